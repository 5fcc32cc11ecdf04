/* latte's C interface: everything a binding needs. C99.
 *
 * Structs. Every struct that may grow begins with `size`, which the caller sets to sizeof of its own declaration (the
 * LATTE_*_INIT macros and latte_*_init functions do, and set the defaults). A caller built against an older header
 * passes a smaller size: what is missing takes its default. A newer caller's larger struct is taken if what this
 * library does not know is all zero, and so must fields named `reserved` be. In structs that the library fills, it
 * writes no more than `size` bytes. latte_tensor, latte_partial, latte_fp8_scale and latte_workspace_need lie in arrays
 * and in other structs and will never change.
 *
 * Errors. Every call returns a latte_code and, where `error` is not NULL, fills it in: which field, what was expected,
 * what came. Nothing throws, prints, or ends the process. On an error no output is touched, except that a handle to be
 * opened or created becomes NULL. Compilers warn where a code is dropped, but for those of close and destroy.
 *
 * Handles. One thread at a time per builder slot and per workspace; everything else may be shared between threads.
 * Strings that the library returns live as long as the handle they were asked from. */
#ifndef LATTE_LATTE_H
#define LATTE_LATTE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Of this header; latte_version() names the library's. */
#define LATTE_VERSION_MAJOR 0
#define LATTE_VERSION_MINOR 1
#define LATTE_VERSION_PATCH 0

#if defined(__GNUC__)
#define LATTE_API __attribute__((visibility("default")))
#define LATTE_NODISCARD __attribute__((warn_unused_result))
#else
#define LATTE_API
#define LATTE_NODISCARD
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- codes and enums; all travel as int32_t ---- */

typedef int32_t latte_code;
enum {
  LATTE_OK = 0,
  LATTE_INVALID_ARGUMENT = 1, /* a field's value, shape, stride or dtype is wrong */
  LATTE_OUT_OF_LIMITS = 2,    /* valid in itself, but above the limits the buffers were sized for */
  LATTE_UNSUPPORTED = 3,      /* correct, but this backend or build cannot do it */
  LATTE_STALE_METADATA = 4,   /* the slot was built again after this metadata was made */
  LATTE_MISSING_ARGUMENT = 5, /* a required field is empty, or only some of a group was given */
  LATTE_CORRUPT_PLAN = 6,     /* a plan that does not describe its own batch */
  LATTE_OUT_OF_MEMORY = 7,    /* the operating system gave no memory */
  LATTE_INTERNAL = 8,         /* a defect of latte: please report it */
  LATTE_DEVICE_FAULT = 9      /* the device or its driver reported an error, maybe of work that was queued earlier */
};

enum { LATTE_F32 = 0, LATTE_BF16 = 1, LATTE_F16 = 2, LATTE_FP8_E4M3 = 3, LATTE_U8 = 4 };
enum { LATTE_KV_BF16 = 0, LATTE_KV_F16 = 1, LATTE_KV_F32 = 2, LATTE_KV_FP8_E4M3 = 3, LATTE_KV_FP8_DS_MLA = 4 };
enum { LATTE_MASK_CAUSAL = 0, LATTE_MASK_NONE = 1 };
enum { LATTE_MATH_AUTOMATIC = 0, LATTE_MATH_HALF = 1, LATTE_MATH_FP8 = 2 };
enum { LATTE_CHECKS_DEBUG_BUILDS = 0, LATTE_CHECKS_ON = 1, LATTE_CHECKS_OFF = 2 };
enum { LATTE_POLICY_BALANCED = 0, LATTE_POLICY_UNIFORM = 1, LATTE_POLICY_BATCH_INVARIANT = 2 };

typedef struct latte_error {
  uint32_t size;
  latte_code code;
  char field[64];
  char expected[160];
  char got[160];
} latte_error;
#define LATTE_ERROR_INIT                           \
  {                                                \
    sizeof(latte_error), LATTE_OK, {0}, {0}, { 0 } \
  }

/* "0.1.0" */
LATTE_API const char* latte_version(void);
LATTE_API const char* latte_code_name(latte_code code);

/* ---- backend: the machine and its resident worker threads, or a GPU ----
 *
 * On cuda every address of a tensor, a page table, a slot mapping or a workspace is a device address, `stream` fields
 * take a cudaStream_t, and calls return when the work is queued. On cpu streams are NULL. */

typedef struct latte_backend latte_backend;

typedef struct latte_backend_options {
  uint32_t size;
  int32_t threads;    /* 0 = what the affinity mask and the cgroup allow */
  const char* name;   /* NULL = "cpu", "cuda", or "auto": cuda where it can be opened, else cpu (see note) */
  const char* kernel; /* NULL = "auto", or the name of one */
  int32_t device;     /* cuda: which GPU, as the driver numbers them */
  /* cuda: 1 = launch everything in ordinary stream order; overlap_previous then has no effect. For engines whose
     kernels do not wait as latte_decode requires. */
  int32_t serial_launches;
} latte_backend_options;
#define LATTE_BACKEND_OPTIONS_INIT \
  { sizeof(latte_backend_options), 0, NULL, NULL, 0, 0 }

typedef struct latte_machine_info {
  uint32_t size;
  int32_t threads;
  const char* backend;
  const char* processor; /* the name of what computes: the CPU, or the GPU */
  const char* features;
  int32_t kernel_count;
  int32_t on_device;  /* 1: tensors lie in the device's memory */
  const char* device; /* the GPU's name, or "" */
  const char* driver; /* "driver 580.65.06, CUDA 13.0", or "" */
  const char* note;   /* of a backend opened as "auto": why it is not cuda, or "" */
} latte_machine_info;
#define LATTE_MACHINE_INFO_INIT \
  { sizeof(latte_machine_info), 0, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL }

typedef struct latte_kernel_info {
  uint32_t size;
  int32_t usable;
  const char* name;
  const char* reason; /* why not usable */
  const char* serves;
} latte_kernel_info;
#define LATTE_KERNEL_INFO_INIT \
  { sizeof(latte_kernel_info), 0, NULL, NULL, NULL }

typedef struct latte_ceilings {
  uint32_t size;
  int32_t reserved;
  double read_gbps; /* streaming reads from memory */
  double tflops;    /* the arithmetic the kernel in question uses */
  double clock_mhz; /* of a device while it did that arithmetic; 0 = not measured */
} latte_ceilings;
#define LATTE_CEILINGS_INIT \
  { sizeof(latte_ceilings), 0, 0.0, 0.0, 0.0 }

/* options may be NULL. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_open(const latte_backend_options* options, latte_backend** backend,
                                                        latte_error* error);
/* Builders made on the backend stay valid. NULL is fine. */
LATTE_API latte_code latte_backend_close(latte_backend* backend, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_backend_info(const latte_backend* backend, latte_machine_info* info,
                                                        latte_error* error);
/* index in [0, kernel_count). cpu: best first; cuda: those for the smallest tiles first. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_kernel(const latte_backend* backend, int32_t index,
                                                          latte_kernel_info* info, latte_error* error);
/* Waits until everything queued in the stream is done, and tells what went wrong on the device since it was last asked:
 * faults, and what the validation kernels of this backend's builders found. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_synchronize(const latte_backend* backend, void* stream,
                                                               latte_error* error);
/* Runs for about a second on the backend's threads or device. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_measure_ceilings(const latte_backend* backend, const char* kernel,
                                                                    latte_ceilings* ceilings, latte_error* error);

/* ---- what stays the same from step to step ---- */

typedef struct latte_problem {
  uint32_t size;
  int32_t heads; /* query heads on this rank */
  int32_t latent;
  int32_t rope;
  int32_t q_dtype;
  int32_t out_dtype;
  int32_t kv_format;
  int32_t page_size; /* tokens a page */
  int32_t mask;
  int32_t reserved;
} latte_problem;
#define LATTE_PROBLEM_INIT \
  { sizeof(latte_problem), 0, 512, 64, LATTE_BF16, LATTE_BF16, LATTE_KV_BF16, 64, LATTE_MASK_CAUSAL, 0 }

typedef struct latte_limits {
  uint32_t size;
  int32_t max_requests;
  int32_t max_query_tokens;       /* of one request */
  int32_t max_total_query_tokens; /* of a step; 0 = max_requests * max_query_tokens */
  int64_t max_total_kv_tokens;    /* of a step; 0 = max_requests * max_kv_tokens */
  int32_t max_kv_tokens;          /* of one request */
  /* 0 = all the backend has. On cuda: multiprocessors. In decode, above 64 rows (heads * max_query_tokens) two of them
     form one worker of the plan, so latte_builder_info's workers is half of this, and at least 2 are needed. */
  int32_t workers;
} latte_limits;
#define LATTE_LIMITS_INIT \
  { sizeof(latte_limits), 0, 1, 0, 0, 0, 0 }

typedef struct latte_support {
  uint32_t size;
  int32_t supported;
  char kernel[32];  /* that would run, when supported */
  char reason[248]; /* why not, when not */
} latte_support;
#define LATTE_SUPPORT_INIT               \
  {                                      \
    sizeof(latte_support), 0, {0}, { 0 } \
  }

/* LATTE_OK whenever the question was answered, with yes or no. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_supports(const latte_backend* backend, const latte_problem* problem,
                                                            latte_support* support, latte_error* error);

typedef struct latte_support_row {
  uint32_t size;
  int32_t backend_count;
  const char* feature;         /* these live for ever */
  const char* const* backends; /* [backend_count] names, the same in every row */
  const char* const* answers;  /* [backend_count] */
} latte_support_row;
#define LATTE_SUPPORT_ROW_INIT \
  { sizeof(latte_support_row), 0, NULL, NULL, NULL }

/* The support table of this build, row by row. */
LATTE_API LATTE_NODISCARD latte_code latte_support_table_rows(int32_t* count, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_support_table_row(int32_t index, latte_support_row* row, latte_error* error);

/* ---- planning a step ---- */

typedef struct latte_builder latte_builder;

typedef struct latte_builder_options {
  uint32_t size;
  int32_t policy;
  /* uniform: splits of every tile; batch_invariant: KV tokens a chunk, 0 = the kernel's choice in decode, never cut in
     prefill */
  int32_t policy_n;
  int32_t slots;         /* steps in flight at once; each has its own plan and workspace */
  int32_t own_workspace; /* 0: the caller passes one to latte_decode */
  /* cuda: 1 = a kernel looks at lengths and page ids before every decode, and every prefill with context. What it finds
     is told by the next call on the builder, or by latte_backend_synchronize. */
  int32_t validate;
  /* For the plans and lengths of all slots: sized and aligned as latte_builder_needs says, uninitialised, used by
     nobody else, alive as long as the builder. NULL = the builder allocates it. */
  void* plan_memory;
  uint64_t plan_memory_bytes;
} latte_builder_options;
#define LATTE_BUILDER_OPTIONS_INIT \
  { sizeof(latte_builder_options), LATTE_POLICY_BALANCED, 0, 1, 1, 0, NULL, 0 }

/* What somebody needs of a step's memory, for latte_workspace_create. */
typedef struct latte_workspace_need {
  const char* name; /* for error messages */
  uint64_t bytes;
  uint64_t alignment; /* 0 = 256, or a power of two up to that */
  /* 0 = every phase of a step, or a bit for each one in which its content is needed. Needs without a phase in common
     share memory. */
  uint64_t phases;
} latte_workspace_need;

typedef struct latte_builder_info {
  uint32_t size;
  int32_t heads;
  int32_t row_tile; /* most query rows (tokens * heads) a tile holds */
  int32_t kv_block; /* KV ranges are multiples of this, except at the end */
  int32_t workers;
  int32_t policy_n; /* as planned: the kernel's choice filled in, chunks rounded up to whole kv_blocks */
  const char* kernel;
  uint64_t workspace_bytes; /* of one slot, to be aligned to 64 bytes */
  int64_t max_tiles;        /* upper bounds that the limits give */
  int64_t max_records;
  int64_t max_partials;
  int64_t max_partial_rows;
  int64_t max_plan_words;
  const char* reason; /* for the kernel */
} latte_builder_info;
#define LATTE_BUILDER_INFO_INIT \
  { sizeof(latte_builder_info), 0, 0, 0, 0, 0, NULL, 0, 0, 0, 0, 0, 0, NULL }

/* The lengths of one step; they are copied. */
typedef struct latte_lengths {
  uint32_t size;
  uint32_t reserved;
  const int32_t* seq_lens; /* [B] KV tokens, this step's query tokens included */
  int64_t seq_lens_count;
  const int32_t* query_start; /* [B + 1] prefix sums of the query lengths */
  int64_t query_start_count;
  /* Optional, [query_start[B]]: query token t sees the first visible[t] of its request's tokens. Replaces the mask. */
  const int32_t* visible;
  int64_t visible_count;
  void* stream; /* cuda: where the upload of the plan is queued */
} latte_lengths;
#define LATTE_LENGTHS_INIT \
  { sizeof(latte_lengths), 0, NULL, 0, NULL, 0, NULL, 0, NULL }

/* The lengths of one step in the device's memory; they stay in place until the step's last decode is done. */
typedef struct latte_device_lengths {
  uint32_t size;
  int32_t requests;
  const int32_t* seq_lens;    /* [requests] */
  const int32_t* query_start; /* [requests + 1] */
  const int32_t* visible;     /* optional, [query_tokens] */
  int32_t query_tokens;       /* rows of q and out; query_start[requests] may be less, never more */
  int32_t reserved;
  void* stream;
} latte_device_lengths;
#define LATTE_DEVICE_LENGTHS_INIT \
  { sizeof(latte_device_lengths), 0, NULL, NULL, NULL, 0, 0, NULL }

/* A planned step, by value. Valid until its slot is built again and while the builder lives. */
typedef struct latte_metadata {
  uint32_t size;
  uint32_t reserved;
  void* slot;
  uint64_t generation;
} latte_metadata;
#define LATTE_METADATA_INIT \
  { sizeof(latte_metadata), 0, NULL, 0 }

/* The six arrays of a plan, as int32 values in the slot's buffer; counts are in rows of the shape named. */
typedef struct latte_plan {
  uint32_t size;
  int32_t workers;
  const int32_t* work_meta_data; /* [count]: counts and offsets, in the order of MetaField in latte/plan.hpp */
  int64_t work_meta_data_count;
  const int32_t* work_indptr; /* [workers + 1] */
  int64_t work_indptr_count;
  const int32_t* work_info_set; /* [count, 8]: request, partial row or -1, rows, KV range, tokens behind, tile */
  int64_t work_info_set_count;
  const int32_t* reduce_indptr; /* [tiles + 1] */
  int64_t reduce_indptr_count;
  const int32_t* reduce_final_map; /* [tiles, 2] */
  int64_t reduce_final_map_count;
  const int32_t* reduce_partial_map; /* [partials] */
  int64_t reduce_partial_map_count;
  int64_t makespan_ticks; /* estimated */
} latte_plan;
#define LATTE_PLAN_INIT \
  { sizeof(latte_plan), 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, 0 }

/* What a builder made with the same arguments needs: `plan` for its options' plan_memory, and `workspace` for one slot
 * where own_workspace is 0. Both are live in every phase until the caller says otherwise. options may be NULL. */
LATTE_API LATTE_NODISCARD latte_code latte_builder_needs(const latte_backend* backend, const latte_problem* problem,
                                                         const latte_limits* limits,
                                                         const latte_builder_options* options,
                                                         latte_workspace_need* plan, latte_workspace_need* workspace,
                                                         latte_error* error);
/* options may be NULL. */
LATTE_API LATTE_NODISCARD latte_code latte_builder_create(const latte_backend* backend, const latte_problem* problem,
                                                          const latte_limits* limits,
                                                          const latte_builder_options* options, latte_builder** builder,
                                                          latte_error* error);
/* NULL is fine. */
LATTE_API latte_code latte_builder_destroy(latte_builder* builder, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_builder_get_info(const latte_builder* builder, latte_builder_info* info,
                                                            latte_error* error);
/* Allocates nothing unless it fails; lengths that are refused leave the slot's last step valid. */
LATTE_API LATTE_NODISCARD latte_code latte_builder_build(latte_builder* builder, int32_t slot,
                                                         const latte_lengths* lengths, latte_metadata* metadata,
                                                         latte_error* error);
/* Plans on the device, in the stream: can be captured in a graph. latte_metadata_plan shows an empty plan for it. */
LATTE_API LATTE_NODISCARD latte_code latte_builder_build_on_device(latte_builder* builder, int32_t slot,
                                                                   const latte_device_lengths* lengths,
                                                                   latte_metadata* metadata, latte_error* error);
/* cuda: once for a workspace of the caller's, before its first use, and again after anyone else wrote to it. */
LATTE_API LATTE_NODISCARD latte_code latte_builder_init_workspace(const latte_builder* builder, void* workspace,
                                                                  uint64_t workspace_bytes, void* stream,
                                                                  latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_metadata_plan(const latte_metadata* metadata, latte_plan* plan,
                                                         latte_error* error);

/* ---- tensors and operations ---- */

/* Strides count elements. A tensor whose data is NULL and whose rank is 0 was not given. */
typedef struct latte_tensor {
  void* data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4];
} latte_tensor;

/* Row-major without gaps. A rank outside 1 .. 4 is kept, for the call that gets the tensor to complain about. */
static inline latte_tensor latte_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  latte_tensor tensor;
  int64_t stride = 1;
  int32_t axis;
  memset(&tensor, 0, sizeof tensor);
  memcpy(&tensor.data, &data, sizeof data); /* inputs and outputs share this struct */
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (axis = rank - 1; axis >= 0 && rank <= 4; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}

typedef struct latte_decode_args {
  uint32_t size;
  float scale;
  latte_tensor q; /* [T, H, latent + rope], or the pair */
  latte_tensor q_nope;
  latte_tensor q_pe;
  latte_tensor kv_cache; /* [pages, page_size, W] */
  latte_tensor out;      /* [T, H, latent] */
  latte_tensor lse;      /* optional, fp32 [T, H] */
  /* A block table or the pair page_indptr, page_indices. */
  const int32_t* block_table; /* [B, max_pages] */
  int64_t block_table_stride; /* elements between rows */
  int64_t max_pages;
  const int32_t* page_indptr; /* [B + 1] */
  int64_t page_indptr_count;
  const int32_t* page_indices;
  int64_t page_indices_count;
  void* workspace; /* NULL = the slot's own */
  uint64_t workspace_bytes;
  float q_scale;             /* fp8 q only */
  float kv_scale;            /* fp8_e4m3 cache only */
  const float* q_scale_ptr;  /* read at run time instead of q_scale */
  const float* kv_scale_ptr; /* read at run time instead of kv_scale */
  void* stream;
  /* cuda: 1 = plan, lengths, page table and older cache slots are read while the kernel queued before still runs. That
     kernel may then write only q and the slots of this step's own tokens (a request's last ones, as many as it has
     query tokens), for which decode waits. */
  int32_t overlap_previous;
  int32_t reserved;
} latte_decode_args;
/* Inline, so that it makes the struct the caller was compiled with: all zero but for the size and the fp8 scales, 1. */
static inline latte_decode_args latte_decode_args_init(void) {
  latte_decode_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.q_scale = 1.0f;
  args.kv_scale = 1.0f;
  return args;
}

/* Writes every element of out and lse for rows [0, query_start[B]) and nothing else. That they overlap neither each
 * other nor what the call reads is the caller's to see to.
 *
 * cuda, graphs: the call can be captured. A replay runs the step that was built into the slot last, on the captured
 * tensors, provided that
 *   - all of these steps are built the same way: by latte_builder_build, or by latte_builder_build_on_device from the
 *     same arrays and with no more query tokens;
 *   - `visible` is given to all of them or to none;
 *   - the captured step had query tokens;
 *   - the page table has a row for each request of the largest.
 *
 * cuda, the kernel queued before: decode may be a programmatic dependent launch. It waits for the kernel queued before;
 * if that is such a launch too, it must itself execute griddepcontrol.wait before it ends. A backend that was opened
 * with serial_launches = 1 does not ask for this. */
LATTE_API LATTE_NODISCARD latte_code latte_decode(const latte_metadata* metadata, const latte_decode_args* args,
                                                  latte_error* error);

typedef struct latte_partial {
  latte_tensor out; /* [T, H, latent], normalised */
  latte_tensor lse; /* fp32 [T, H]; -inf = saw nothing */
} latte_partial;

typedef struct latte_merge_args {
  uint32_t size;
  int32_t partial_count; /* >= 1; cuda: at most 64 */
  const latte_partial* partials;
  latte_tensor out; /* may be one of the partials' own */
  latte_tensor lse; /* optional */
  void* stream;
} latte_merge_args;
static inline latte_merge_args latte_merge_args_init(void) {
  latte_merge_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  return args;
}

LATTE_API LATTE_NODISCARD latte_code latte_merge(const latte_backend* backend, const latte_merge_args* args,
                                                 latte_error* error);

typedef struct latte_write_kv_args {
  uint32_t size;
  int32_t kv_format;
  latte_tensor kv_c;           /* [N, latent] */
  latte_tensor k_pe;           /* [N, rope] */
  latte_tensor kv_cache;       /* [pages, page_size, W] */
  const int64_t* slot_mapping; /* [N]: page * page_size + position; negative = skip */
  int64_t slot_mapping_count;
  float kv_scale; /* fp8_e4m3: stored = value / kv_scale */
  int32_t reserved;
  void* stream;
  const float* kv_scale_ptr; /* read at run time instead of kv_scale, where the tensors are */
} latte_write_kv_args;
static inline latte_write_kv_args latte_write_kv_args_init(void) {
  latte_write_kv_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.kv_scale = 1.0f;
  return args;
}

LATTE_API LATTE_NODISCARD latte_code latte_write_kv(const latte_backend* backend, const latte_write_kv_args* args,
                                                    latte_error* error);

typedef struct latte_gather_kv_args {
  uint32_t size;
  int32_t kv_format;
  latte_tensor kv_cache; /* [pages, page_size, W] */
  latte_tensor out;      /* [N, latent + rope], bf16, f16 or f32 */
  /* A block table or the pair page_indptr, page_indices. */
  const int32_t* block_table; /* [B, max_pages] */
  int64_t block_table_stride; /* elements between rows */
  int64_t max_pages;
  const int32_t* page_indptr; /* [B + 1] */
  int64_t page_indptr_count;
  const int32_t* page_indices;
  int64_t page_indices_count;
  /* Row out_start[b] + i gets token first_token + i of request b, for all rows before out_start[b + 1]. */
  const int32_t* out_start; /* [B + 1] */
  int64_t out_start_count;
  int32_t first_token;
  int32_t tokens; /* out_start[B] */
  float kv_scale; /* fp8_e4m3 only */
  int32_t reserved;
  void* stream;
  const float* kv_scale_ptr; /* read at run time instead of kv_scale, where the tensors are */
} latte_gather_kv_args;
static inline latte_gather_kv_args latte_gather_kv_args_init(void) {
  latte_gather_kv_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.kv_scale = 1.0f;
  return args;
}

/* Copies tokens of a paged cache to dense rows, fp8 ones multiplied out. */
LATTE_API LATTE_NODISCARD latte_code latte_gather_kv(const latte_backend* backend, const latte_gather_kv_args* args,
                                                     latte_error* error);

/* ---- prefill: expanded keys and values, one K and V a head ---- */

/* Older tokens of the requests, in the paged cache. */
typedef struct latte_prefill_context {
  uint32_t size;
  int32_t latent;
  int32_t rope;
  int32_t kv_format;
  int32_t page_size;
  int32_t max_tokens;       /* of one request */
  int64_t max_total_tokens; /* of a step; 0 = max_requests * max_tokens */
  /* Most a slot may use for chunks and what joins them; 0 = 256 MiB, or the least that works if that is more. */
  int64_t workspace_bytes;
} latte_prefill_context;
#define LATTE_PREFILL_CONTEXT_INIT \
  { sizeof(latte_prefill_context), 512, 64, LATTE_KV_BF16, 64, 0, 0, 0 }

typedef struct latte_prefill_problem {
  uint32_t size;
  int32_t heads; /* on this rank */
  int32_t qk_width;
  int32_t v_width;
  int32_t dtype; /* of q, k and v */
  int32_t out_dtype;
  int32_t mask;
  int32_t math;
  const latte_prefill_context* context; /* NULL = no request has older tokens */
} latte_prefill_problem;
#define LATTE_PREFILL_PROBLEM_INIT \
  { sizeof(latte_prefill_problem), 0, 192, 128, LATTE_BF16, LATTE_BF16, LATTE_MASK_CAUSAL, LATTE_MATH_AUTOMATIC, NULL }

/* LATTE_OK whenever the question was answered, with yes or no. */
LATTE_API LATTE_NODISCARD latte_code latte_backend_supports_prefill(const latte_backend* backend,
                                                                    const latte_prefill_problem* problem,
                                                                    latte_support* support, latte_error* error);

typedef struct latte_prefill_builder latte_prefill_builder;

typedef struct latte_prefill_builder_info {
  uint32_t size;
  int32_t heads;
  int32_t row_tile; /* most query tokens (of one head) a tile holds */
  int32_t kv_block; /* KV ranges are multiples of this, except at the end */
  int32_t workers;
  int32_t policy_n;     /* as planned: chunks rounded up to whole kv_blocks */
  int32_t math;         /* what runs: half or fp8 */
  int32_t chunk_tokens; /* most context tokens of a chunk, over all requests; 0 = no context */
  const char* kernel;
  const char* reason;       /* for kernel and math */
  uint64_t workspace_bytes; /* of one slot, to be aligned to 256 bytes */
  int64_t max_tiles;        /* upper bounds that the limits give */
  int64_t max_records;
  int64_t max_partials;
  int64_t max_partial_rows;
  int64_t max_plan_words;
} latte_prefill_builder_info;
#define LATTE_PREFILL_BUILDER_INFO_INIT \
  { sizeof(latte_prefill_builder_info), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0, 0, 0, 0, 0 }

/* The lengths of one step; they are copied. */
typedef struct latte_prefill_lengths {
  uint32_t size;
  uint32_t reserved;
  const int32_t* query_start; /* [B + 1] prefix sums of the query lengths */
  int64_t query_start_count;
  const int32_t* kv_start; /* [B + 1] prefix sums of the lengths of k and v */
  int64_t kv_start_count;
  const int32_t* context_lens; /* only with a context, [B]: tokens in the cache, seen by all query tokens */
  int64_t context_lens_count;
  void* stream; /* cuda: where the upload of the plan is queued */
} latte_prefill_lengths;
#define LATTE_PREFILL_LENGTHS_INIT \
  { sizeof(latte_prefill_lengths), 0, NULL, 0, NULL, 0, NULL, 0, NULL }

/* A planned step, by value. Valid until its slot is built again and while the builder lives. */
typedef struct latte_prefill_metadata {
  uint32_t size;
  int32_t chunks; /* of the context */
  void* slot;
  uint64_t generation;
} latte_prefill_metadata;
#define LATTE_PREFILL_METADATA_INIT \
  { sizeof(latte_prefill_metadata), 0, NULL, 0 }

/* As latte_builder_needs. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill_builder_needs(const latte_backend* backend,
                                                                 const latte_prefill_problem* problem,
                                                                 const latte_limits* limits,
                                                                 const latte_builder_options* options,
                                                                 latte_workspace_need* plan,
                                                                 latte_workspace_need* workspace, latte_error* error);
/* options may be NULL. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill_builder_create(const latte_backend* backend,
                                                                  const latte_prefill_problem* problem,
                                                                  const latte_limits* limits,
                                                                  const latte_builder_options* options,
                                                                  latte_prefill_builder** builder, latte_error* error);
/* NULL is fine. */
LATTE_API latte_code latte_prefill_builder_destroy(latte_prefill_builder* builder, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_prefill_builder_get_info(const latte_prefill_builder* builder,
                                                                    latte_prefill_builder_info* info,
                                                                    latte_error* error);
/* Allocates nothing unless it fails; lengths that are refused leave the slot's last step valid. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill_builder_build(latte_prefill_builder* builder, int32_t slot,
                                                                 const latte_prefill_lengths* lengths,
                                                                 latte_prefill_metadata* metadata, latte_error* error);
/* cuda: once for a workspace of the caller's, before its first use, and again after anyone else wrote to it. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill_builder_init_workspace(const latte_prefill_builder* builder,
                                                                          void* workspace, uint64_t workspace_bytes,
                                                                          void* stream, latte_error* error);
/* chunk: -1 = the plan of the new tokens. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill_metadata_plan(const latte_prefill_metadata* metadata, int32_t chunk,
                                                                 latte_plan* plan, latte_error* error);

/* One number for a tensor, or one for each head where the tensors lie. value = stored * scale. */
typedef struct latte_fp8_scale {
  float value;
  int32_t per_head; /* needs ptr */
  const float* ptr; /* read at run time instead of value: one number, or [heads] */
} latte_fp8_scale;

/* A chunk of the context on its way: the caller fills k and v from the latent rows, in the stream. k and v have the
 * problem's dtype: where that is fp8, what is filled in counts times the call's k_scale and v_scale, like k and v
 * themselves. Latent rows are f16 or f32 where the cache is, else bf16, with the cache's scales multiplied out. */
typedef struct latte_context_chunk {
  uint32_t size;
  int32_t index;  /* counts up from 0 */
  int32_t tokens; /* rows of the tensors below */
  int32_t reserved;
  const int32_t* kv_start; /* [B + 1], on the host: request b owns rows [kv_start[b], kv_start[b + 1]) */
  int64_t kv_start_count;
  latte_tensor latent; /* [tokens, latent + rope]: read only */
  latte_tensor k;      /* [tokens, heads, qk_width] */
  latte_tensor v;      /* [tokens, heads, v_width] */
  void* stream;
} latte_context_chunk;
/* Anything but LATTE_OK ends the call, which returns it together with what is written to `error`. Must not throw, nor
 * use the slot's builder or metadata. */
typedef latte_code (*latte_expand_chunk)(void* user, const latte_context_chunk* chunk, latte_error* error);

typedef struct latte_prefill_args {
  uint32_t size;
  float scale;
  latte_tensor q;   /* [Tq, H, qk_width] */
  latte_tensor k;   /* [Tk, H, qk_width] */
  latte_tensor v;   /* [Tk, H, v_width] */
  latte_tensor out; /* [Tq, H, v_width] */
  latte_tensor lse; /* optional, fp32 [Tq, H] */
  latte_fp8_scale q_scale;
  latte_fp8_scale k_scale;
  latte_fp8_scale v_scale;
  void* workspace; /* NULL = the slot's own */
  uint64_t workspace_bytes;
  void* stream;
  /* Only with a context. */
  latte_tensor kv_cache; /* [pages, page_size, W] */
  /* A block table or the pair page_indptr, page_indices. */
  const int32_t* block_table; /* [B, max_pages] */
  int64_t block_table_stride; /* elements between rows */
  int64_t max_pages;
  const int32_t* page_indptr; /* [B + 1] */
  int64_t page_indptr_count;
  const int32_t* page_indices;
  int64_t page_indices_count;
  float kv_scale; /* fp8_e4m3 cache only */
  int32_t reserved;
  latte_expand_chunk expand;
  void* user;
  const float* kv_scale_ptr; /* read at run time instead of kv_scale, where the tensors are */
} latte_prefill_args;
static inline latte_prefill_args latte_prefill_args_init(void) {
  latte_prefill_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.q_scale.value = 1.0f;
  args.k_scale.value = 1.0f;
  args.v_scale.value = 1.0f;
  args.kv_scale = 1.0f;
  return args;
}

/* Writes every element of out and lse for rows [0, query_start[B]) and nothing else. That they overlap neither each
 * other nor what the call reads is the caller's to see to. If it is `expand` that fails, the workspace was written. k
 * and v may be left out when the step brings no new keys.
 *
 * cuda, graphs: the call can be captured.
 *   - Without context a replay runs the step that was built into the slot last, if that one has no context either and
 *     the captured one had query tokens and rows of k and v. Rows of q, out and lse behind the captured tensors are
 *     dropped; k and v must have had rows for all tokens of every later step (missing ones count as zeros).
 *   - With context a replay repeats the captured step, chunk by chunk: `expand` may only queue work in the stream, and
 *     nothing else may be built into the slot. */
LATTE_API LATTE_NODISCARD latte_code latte_prefill(const latte_prefill_metadata* metadata,
                                                   const latte_prefill_args* args, latte_error* error);

/* ---- scratch memory for a whole step; latte/workspace.hpp says more ---- */

typedef struct latte_workspace latte_workspace;

typedef struct latte_workspace_slice {
  uint32_t size;
  int32_t need;
  void* data;
  uint64_t bytes;
  uint64_t generation;
} latte_workspace_slice;
#define LATTE_WORKSPACE_SLICE_INIT \
  { sizeof(latte_workspace_slice), -1, NULL, 0, 0 }

/* checks: LATTE_CHECKS_... */
LATTE_API LATTE_NODISCARD latte_code latte_workspace_create(const latte_backend* backend,
                                                            const latte_workspace_need* needs, int32_t need_count,
                                                            int32_t checks, latte_workspace** workspace,
                                                            latte_error* error);
/* NULL is fine. */
LATTE_API latte_code latte_workspace_destroy(latte_workspace* workspace, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_workspace_take(latte_workspace* workspace, int32_t need,
                                                          latte_workspace_slice* slice, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_workspace_give_back(latte_workspace* workspace,
                                                               const latte_workspace_slice* slice, latte_error* error);
LATTE_API LATTE_NODISCARD latte_code latte_workspace_check(const latte_workspace* workspace, latte_error* error);

#ifdef __cplusplus
}
#endif

#endif
