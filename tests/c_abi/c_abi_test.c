/* latte.h from plain C: every function is called, real numbers are checked, and broken arguments get codes.
 * Without arguments all tests run; with the name of one, that one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"
#include "latte/latte.h"

static int checks = 0;
static int failures = 0;

int check(int ok, const char* what, const char* file, int line) {
  ++checks;
  if (!ok) {
    ++failures;
    fprintf(stderr, "%s:%d: %s\n", file, line, what);
  }
  return ok;
}

int check_code(latte_code expected, latte_code got, const char* what, const char* file, int line) {
  ++checks;
  if (expected == got) return 1;
  ++failures;
  fprintf(stderr, "%s:%d: %s: expected %s, got %s\n", file, line, what, latte_code_name(expected),
          latte_code_name(got));
  return 0;
}

/* ---- a small step: one request, 8 tokens in two pages, 2 query tokens, 3 heads, fp32 ---- */

enum { kTokens = 2, kHeads = 3, kLatent = 32, kRope = 16, kWidth = kLatent + kRope, kPages = 2, kPage = 4, kKeys = 8 };

typedef struct step {
  latte_backend* backend;
  latte_builder* builder;
  latte_metadata metadata;
  float q[kTokens * kHeads * kWidth];
  float kv_c[kKeys * kLatent];
  float k_pe[kKeys * kRope];
  float cache[kPages * kPage * kWidth];
  float out[kTokens * kHeads * kLatent];
  float lse[kTokens * kHeads];
  int32_t block_table[kPages];
} step;

static float wave(int i, int period) { return (float)((i * 7) % period - period / 2) / (float)period; }

static latte_tensor tensor3(const void* data, int64_t a, int64_t b, int64_t c) {
  int64_t shape[3];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  return latte_dense(data, LATTE_F32, 3, shape);
}

static latte_tensor tensor2(const void* data, int64_t a, int64_t b) {
  int64_t shape[2];
  shape[0] = a;
  shape[1] = b;
  return latte_dense(data, LATTE_F32, 2, shape);
}

static latte_problem step_problem(int32_t mask) {
  latte_problem problem = LATTE_PROBLEM_INIT;
  problem.heads = kHeads;
  problem.latent = kLatent;
  problem.rope = kRope;
  problem.q_dtype = LATTE_F32;
  problem.out_dtype = LATTE_F32;
  problem.kv_format = LATTE_KV_F32;
  problem.page_size = kPage;
  problem.mask = mask;
  return problem;
}

static latte_limits step_limits(void) {
  latte_limits limits = LATTE_LIMITS_INIT;
  limits.max_requests = 2;
  limits.max_query_tokens = kTokens;
  limits.max_kv_tokens = kKeys;
  return limits;
}

/* Plans one request with `keys` tokens into slot 0. */
static latte_code build_step(step* s, int32_t keys) {
  int32_t query_start[2] = {0, kTokens};
  latte_lengths lengths = LATTE_LENGTHS_INIT;
  lengths.seq_lens = &keys;
  lengths.seq_lens_count = 1;
  lengths.query_start = query_start;
  lengths.query_start_count = 2;
  return latte_builder_build(s->builder, 0, &lengths, &s->metadata, NULL);
}

static latte_code write_step(step* s) {
  int64_t slots[kKeys];
  latte_write_kv_args args = latte_write_kv_args_init();
  int i;
  for (i = 0; i < kKeys; ++i) slots[i] = s->block_table[i / kPage] * kPage + i % kPage;
  args.kv_format = LATTE_KV_F32;
  args.kv_c = tensor2(s->kv_c, kKeys, kLatent);
  args.k_pe = tensor2(s->k_pe, kKeys, kRope);
  args.kv_cache = tensor3(s->cache, kPages, kPage, kWidth);
  args.slot_mapping = slots;
  args.slot_mapping_count = kKeys;
  return latte_write_kv(s->backend, &args, NULL);
}

static int setup(step* s, int32_t mask) {
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  latte_problem problem = step_problem(mask);
  latte_limits limits = step_limits();
  latte_metadata fresh = LATTE_METADATA_INIT;
  int i;
  memset(s, 0, sizeof *s);
  s->metadata = fresh;
  options.threads = 2;
  for (i = 0; i < kTokens * kHeads * kWidth; ++i) s->q[i] = wave(i, 23);
  for (i = 0; i < kKeys * kLatent; ++i) s->kv_c[i] = wave(i, 31);
  for (i = 0; i < kKeys * kRope; ++i) s->k_pe[i] = wave(i, 19);
  s->block_table[0] = 1; /* not in order */
  s->block_table[1] = 0;
  return CHECK_CODE(LATTE_OK, latte_backend_open(&options, &s->backend, NULL)) &&
         CHECK_CODE(LATTE_OK, latte_builder_create(s->backend, &problem, &limits, NULL, &s->builder, NULL)) &&
         CHECK_CODE(LATTE_OK, build_step(s, kKeys)) && CHECK_CODE(LATTE_OK, write_step(s));
}

static void teardown(step* s) {
  CHECK_CODE(LATTE_OK, latte_builder_destroy(s->builder, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(s->backend, NULL));
}

static latte_decode_args step_args(step* s) {
  latte_decode_args args = latte_decode_args_init();
  args.scale = 0.5f;
  args.q = tensor3(s->q, kTokens, kHeads, kWidth);
  args.kv_cache = tensor3(s->cache, kPages, kPage, kWidth);
  args.out = tensor3(s->out, kTokens, kHeads, kLatent);
  args.lse = tensor2(s->lse, kTokens, kHeads);
  args.block_table = s->block_table;
  args.block_table_stride = kPages;
  args.max_pages = kPages;
  return args;
}

/* The textbook, in doubles, from what was written: compares one row over keys [0, visible). */
static void check_row(const step* s, int token, int head, int visible) {
  const float* q = s->q + (token * kHeads + head) * kWidth;
  const float* out = s->out + (token * kHeads + head) * kLatent;
  double sum = 0, expected[kLatent];
  int key, i;
  memset(expected, 0, sizeof expected);
  for (key = 0; key < visible; ++key) {
    double score = 0, weight;
    for (i = 0; i < kLatent; ++i) score += (double)q[i] * (double)s->kv_c[key * kLatent + i];
    for (i = 0; i < kRope; ++i) score += (double)q[kLatent + i] * (double)s->k_pe[key * kRope + i];
    weight = exp(0.5 * score);
    sum += weight;
    for (i = 0; i < kLatent; ++i) expected[i] += weight * (double)s->kv_c[key * kLatent + i];
  }
  for (i = 0; i < kLatent; ++i) CHECK(fabs((double)out[i] - expected[i] / sum) < 1e-5);
  CHECK(fabs((double)s->lse[token * kHeads + head] - log(sum)) < 1e-5);
}

static void check_all_rows(const step* s, int first_visible, int second_visible) {
  int head;
  for (head = 0; head < kHeads; ++head) {
    check_row(s, 0, head, first_visible);
    check_row(s, 1, head, second_visible);
  }
}

/* ---- tests ---- */

static void version_and_names(void) {
  char header[32];
  /* The library's is that of CMakeLists.txt. */
  snprintf(header, sizeof header, "%d.%d.%d", LATTE_VERSION_MAJOR, LATTE_VERSION_MINOR, LATTE_VERSION_PATCH);
  CHECK(strcmp(latte_version(), header) == 0);
  CHECK(strcmp(latte_code_name(LATTE_OK), "ok") == 0);
  CHECK(strcmp(latte_code_name(LATTE_STALE_METADATA), "stale_metadata") == 0);
  CHECK(strcmp(latte_code_name(12345), "unknown") == 0);
}

static void machine_and_kernels(void) {
  latte_backend* backend = NULL;
  latte_machine_info info = LATTE_MACHINE_INFO_INIT;
  latte_kernel_info kernel = LATTE_KERNEL_INFO_INIT;
  latte_error error = LATTE_ERROR_INIT;
  int32_t i, usable = 0;
  if (!CHECK_CODE(LATTE_OK, latte_backend_open(NULL, &backend, &error))) return;
  CHECK(error.code == LATTE_OK && error.field[0] == '\0');
  CHECK_CODE(LATTE_OK, latte_backend_info(backend, &info, NULL));
  CHECK(info.threads >= 1 && strcmp(info.backend, "cpu") == 0 && info.processor != NULL && info.features != NULL);
  CHECK(info.kernel_count >= 1);
  for (i = 0; i < info.kernel_count; ++i) {
    CHECK_CODE(LATTE_OK, latte_backend_kernel(backend, i, &kernel, NULL));
    CHECK(strlen(kernel.name) > 0 && strlen(kernel.serves) > 0);
    CHECK(kernel.usable || strlen(kernel.reason) > 0);
    usable += kernel.usable;
  }
  CHECK(usable >= 1);
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_kernel(backend, info.kernel_count, &kernel, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_kernel(backend, -1, &kernel, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_kernel(NULL, 0, &kernel, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_info(backend, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_info(NULL, &info, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_open(NULL, NULL, &error));
  CHECK(strcmp(error.field, "backend") == 0 && error.code == LATTE_MISSING_ARGUMENT);
}

static void ceilings(void) {
  latte_backend* backend = NULL;
  latte_ceilings measured = LATTE_CEILINGS_INIT;
  if (!CHECK_CODE(LATTE_OK, latte_backend_open(NULL, &backend, NULL))) return;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_measure_ceilings(backend, "quantum", &measured, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_measure_ceilings(backend, NULL, &measured, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_measure_ceilings(backend, "scalar", &measured, NULL));
  CHECK(measured.read_gbps > 0 && measured.tflops > 0 && measured.clock_mhz == 0);
  measured.size = (uint32_t)offsetof(latte_ceilings, clock_mhz); /* of a caller who does not know it yet */
  measured.clock_mhz = -1;
  CHECK_CODE(LATTE_OK, latte_backend_measure_ceilings(backend, "scalar", &measured, NULL));
  CHECK(measured.clock_mhz == -1);
  CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));
}

static void support(void) {
  latte_backend* backend = NULL;
  latte_problem problem = step_problem(LATTE_MASK_CAUSAL);
  latte_support answer = LATTE_SUPPORT_INIT;
  latte_support_row row = LATTE_SUPPORT_ROW_INIT;
  int32_t rows = 0, i;
  if (!CHECK_CODE(LATTE_OK, latte_backend_open(NULL, &backend, NULL))) return;
  CHECK_CODE(LATTE_OK, latte_backend_supports(backend, &problem, &answer, NULL));
  CHECK(answer.supported && strlen(answer.kernel) > 0 && answer.reason[0] == '\0');
  problem.latent = 33;
  CHECK_CODE(LATTE_OK, latte_backend_supports(backend, &problem, &answer, NULL));
  CHECK(!answer.supported && strstr(answer.reason, "latent") != NULL && answer.kernel[0] == '\0');
  problem.q_dtype = 256; /* would be fp32 if it were cut to a byte */
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_supports(backend, &problem, &answer, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports(backend, NULL, &answer, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports(backend, &problem, NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_support_table_rows(&rows, NULL));
  CHECK(rows > 10);
  for (i = 0; i < rows; ++i) {
    CHECK_CODE(LATTE_OK, latte_support_table_row(i, &row, NULL));
    CHECK(strlen(row.feature) > 0 && row.backend_count == 2);
    CHECK(strcmp(row.backends[0], "cpu") == 0 && strcmp(row.backends[1], "cuda") == 0);
    CHECK(strlen(row.answers[0]) > 0 && strlen(row.answers[1]) > 0 && strcmp(row.answers[0], "no") != 0);
  }
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_support_table_row(rows, &row, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_support_table_rows(NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));
}

static void decode_numbers(void) {
  static step s;
  latte_decode_args args;
  latte_error error = LATTE_ERROR_INIT;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  args = step_args(&s);
  CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, &error));
  CHECK(error.code == LATTE_OK);
  check_all_rows(&s, kKeys - 1, kKeys);

  /* The same through the pair and page lists, with the caller's workspace. */
  {
    latte_builder_info info = LATTE_BUILDER_INFO_INIT;
    int32_t indptr[2] = {0, kPages};
    char* memory;
    CHECK_CODE(LATTE_OK, latte_builder_get_info(s.builder, &info, NULL));
    memory = (char*)malloc(info.workspace_bytes + 64);
    memset(s.out, 0, sizeof s.out);
    args.q_nope = args.q;
    args.q_nope.shape[2] = kLatent;
    args.q_pe = args.q;
    args.q_pe.data = s.q + kLatent;
    args.q_pe.shape[2] = kRope;
    memset(&args.q, 0, sizeof args.q);
    args.block_table = NULL;
    args.max_pages = 0;
    args.page_indptr = indptr;
    args.page_indptr_count = 2;
    args.page_indices = s.block_table;
    args.page_indices_count = kPages;
    args.workspace = memory + (64 - (uintptr_t)memory % 64);
    args.workspace_bytes = info.workspace_bytes;
    CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
    check_all_rows(&s, kKeys - 1, kKeys);
    free(memory);
  }
  teardown(&s);
}

static void visible_bounds(void) {
  static step s;
  int32_t seq_len = kKeys, query_start[2] = {0, kTokens}, visible[kTokens] = {3, 5};
  latte_lengths lengths = LATTE_LENGTHS_INIT;
  latte_decode_args args;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  lengths.seq_lens = &seq_len;
  lengths.seq_lens_count = 1;
  lengths.query_start = query_start;
  lengths.query_start_count = 2;
  lengths.visible = visible;
  lengths.visible_count = kTokens;
  CHECK_CODE(LATTE_OK, latte_builder_build(s.builder, 0, &lengths, &s.metadata, NULL));
  args = step_args(&s);
  CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
  check_all_rows(&s, 3, 5);
  teardown(&s);
}

/* Each page decoded alone and the two joined is the whole. */
static void merge_numbers(void) {
  static step s;
  static float parts[2][kTokens * kHeads * kLatent], lses[2][kTokens * kHeads];
  latte_partial partials[2];
  latte_merge_args merge = latte_merge_args_init();
  int page;
  if (!setup(&s, LATTE_MASK_NONE)) return;
  CHECK_CODE(LATTE_OK, build_step(&s, kPage));
  for (page = 0; page < 2; ++page) {
    latte_decode_args args = step_args(&s);
    args.block_table = s.block_table + page;
    args.max_pages = 1;
    args.out.data = parts[page];
    args.lse.data = lses[page];
    CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
    partials[page].out = args.out;
    partials[page].lse = args.lse;
  }
  merge.partials = partials;
  merge.partial_count = 2;
  merge.out = tensor3(s.out, kTokens, kHeads, kLatent);
  merge.lse = tensor2(s.lse, kTokens, kHeads);
  CHECK_CODE(LATTE_OK, latte_merge(s.backend, &merge, NULL));
  check_all_rows(&s, kKeys, kKeys);
  merge.partial_count = -1;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_merge(s.backend, &merge, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_merge(s.backend, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_merge(NULL, &merge, NULL));
  teardown(&s);
}

static void plan_arrays(void) {
  static step s;
  latte_plan plan = LATTE_PLAN_INIT;
  latte_builder_info info = LATTE_BUILDER_INFO_INIT;
  int64_t i;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  CHECK_CODE(LATTE_OK, latte_metadata_plan(&s.metadata, &plan, NULL));
  CHECK_CODE(LATTE_OK, latte_builder_get_info(s.builder, &info, NULL));
  CHECK(info.heads == kHeads && info.workers == plan.workers && info.row_tile >= 1 && info.kv_block >= 1);
  CHECK(strlen(info.kernel) > 0 && strlen(info.reason) > 0 && info.workspace_bytes > 0);
  CHECK(plan.work_meta_data != NULL && plan.work_meta_data_count > 0);
  CHECK(plan.work_indptr_count == plan.workers + 1);
  CHECK(plan.work_indptr[0] == 0 && plan.work_indptr[plan.workers] == plan.work_info_set_count);
  CHECK(plan.work_info_set_count >= 1 && plan.work_info_set_count <= info.max_records);
  CHECK(plan.reduce_indptr_count == plan.reduce_final_map_count + 1);
  CHECK(plan.reduce_final_map_count <= info.max_tiles);
  CHECK(plan.reduce_partial_map_count <= info.max_partials);
  CHECK(plan.makespan_ticks > 0);
  for (i = 0; i < plan.work_info_set_count; ++i) {
    const int32_t* record = plan.work_info_set + 8 * i;
    CHECK(record[0] == 0);
    CHECK(record[2] >= 0 && record[2] < record[3] && record[3] <= kTokens * kHeads);
    CHECK(record[4] >= 0 && record[4] <= record[5] && record[5] <= kKeys);
  }
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_metadata_plan(NULL, &plan, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_metadata_plan(&s.metadata, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_get_info(NULL, &info, NULL));
  teardown(&s);
}

/* Callers of other versions of this header. */
static void struct_versions(void) {
  static step s;
  struct {
    latte_problem known;
    int64_t unknown;
  } newer;
  struct {
    uint32_t size;
    int32_t heads;
  } oldest;
  latte_problem problem = step_problem(LATTE_MASK_CAUSAL);
  latte_support answer = LATTE_SUPPORT_INIT;
  latte_error error = LATTE_ERROR_INIT;
  latte_machine_info info = LATTE_MACHINE_INFO_INIT;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;

  /* Newer: fine as long as it asks for nothing new. */
  newer.known = problem;
  newer.known.size = sizeof newer;
  newer.unknown = 0;
  CHECK_CODE(LATTE_OK, latte_backend_supports(s.backend, &newer.known, &answer, NULL));
  CHECK(answer.supported);
  newer.unknown = 1;
  CHECK_CODE(LATTE_UNSUPPORTED, latte_backend_supports(s.backend, &newer.known, &answer, &error));
  CHECK(strcmp(error.field, "problem.size") == 0);

  /* Older: what is missing has its default (512 + 64, bf16). */
  oldest.size = sizeof oldest;
  oldest.heads = 16;
  CHECK_CODE(LATTE_OK, latte_backend_supports(s.backend, (const latte_problem*)(const void*)&oldest, &answer, NULL));
  CHECK(answer.supported);

  /* Neither: a size nobody set, or one that cuts a field in two. */
  problem.size = 0;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_supports(s.backend, &problem, &answer, &error));
  CHECK(strcmp(error.field, "problem.size") == 0 && strlen(error.expected) > 0 && strcmp(error.got, "0") == 0);
  problem.size = 0xdeadbee8u;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_supports(s.backend, &problem, &answer, NULL));
  problem.size = 12;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_supports(s.backend, &problem, &answer, NULL));

  /* What the library fills in stays within the caller's size. */
  info.size = offsetof(latte_machine_info, processor);
  info.processor = "mine";
  CHECK_CODE(LATTE_OK, latte_backend_info(s.backend, &info, NULL));
  CHECK(info.size == offsetof(latte_machine_info, processor) && info.threads == 2);
  CHECK(strcmp(info.backend, "cpu") == 0 && strcmp(info.processor, "mine") == 0);

  /* An error struct too, down to one that has room for the code alone. */
  memset(&error, 'x', sizeof error);
  error.size = offsetof(latte_error, field);
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports(s.backend, NULL, &answer, &error));
  CHECK(error.code == LATTE_MISSING_ARGUMENT && error.field[0] == 'x');
  error.size = offsetof(latte_error, field) + 4;
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports(s.backend, NULL, &answer, &error));
  CHECK(strcmp(error.field, "pro") == 0 && error.field[4] == 'x');

  /* decode from before workspaces and fp8 scales existed. */
  {
    latte_decode_args args = step_args(&s);
    args.size = offsetof(latte_decode_args, workspace);
    args.workspace = &args; /* garbage as far as that caller's struct goes */
    args.kv_scale = -1;
    CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
    check_all_rows(&s, kKeys - 1, kKeys);
  }
  teardown(&s);
}

static void null_arguments(void) {
  static step s;
  latte_problem problem = step_problem(LATTE_MASK_CAUSAL);
  latte_limits limits = step_limits();
  latte_builder* builder = NULL;
  latte_metadata metadata = LATTE_METADATA_INIT;
  latte_lengths lengths = LATTE_LENGTHS_INIT;
  latte_decode_args args;
  latte_write_kv_args write = latte_write_kv_args_init();
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_create(NULL, &problem, &limits, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_create(s.backend, NULL, &limits, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_create(s.backend, &problem, NULL, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_create(s.backend, &problem, &limits, NULL, NULL, NULL));
  CHECK(builder == NULL);
  CHECK_CODE(LATTE_OK, latte_builder_destroy(NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_build(NULL, 0, &lengths, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_build(s.builder, 0, NULL, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_build(s.builder, 0, &lengths, NULL, NULL));
  lengths.seq_lens_count = -1;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_builder_build(s.builder, 0, &lengths, &metadata, NULL));
  args = step_args(&s);
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_decode(NULL, &args, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_decode(&s.metadata, NULL, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_decode(&metadata, &args, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_write_kv(NULL, &write, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_write_kv(s.backend, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_write_kv(s.backend, &write, NULL));
  CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
  teardown(&s);
}

static void policies_and_slots(void) {
  static step s;
  latte_builder_options options = LATTE_BUILDER_OPTIONS_INIT;
  latte_problem problem = step_problem(LATTE_MASK_CAUSAL);
  latte_limits limits = step_limits();
  latte_builder_info info = LATTE_BUILDER_INFO_INIT;
  latte_metadata first = LATTE_METADATA_INIT;
  latte_decode_args args;
  int32_t policy;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  options.slots = 2;
  options.policy_n = 2;
  for (policy = LATTE_POLICY_BALANCED; policy <= LATTE_POLICY_BATCH_INVARIANT; ++policy) {
    CHECK_CODE(LATTE_OK, latte_builder_destroy(s.builder, NULL));
    s.builder = NULL;
    options.policy = policy;
    if (!CHECK_CODE(LATTE_OK, latte_builder_create(s.backend, &problem, &limits, &options, &s.builder, NULL))) break;
    CHECK_CODE(LATTE_OK, latte_builder_get_info(s.builder, &info, NULL));
    if (policy == LATTE_POLICY_UNIFORM) CHECK(info.policy_n == 2);
    if (policy == LATTE_POLICY_BATCH_INVARIANT) CHECK(info.policy_n == info.kv_block);
    CHECK_CODE(LATTE_OK, build_step(&s, kKeys));
    args = step_args(&s);
    memset(s.out, 0, sizeof s.out);
    CHECK_CODE(LATTE_OK, latte_decode(&s.metadata, &args, NULL));
    check_all_rows(&s, kKeys - 1, kKeys);
    first = s.metadata;
    CHECK_CODE(LATTE_OK, build_step(&s, kKeys));
    CHECK_CODE(LATTE_STALE_METADATA, latte_decode(&first, &args, NULL));
    CHECK(s.metadata.generation > first.generation && s.metadata.slot == first.slot);
  }
  options.policy = 3;
  {
    latte_builder* builder = NULL;
    CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_builder_create(s.backend, &problem, &limits, &options, &builder, NULL));
  }
  teardown(&s);
}

/* What a caller with a GPU uses, as far as it goes without one. */
static void streams_and_devices(void) {
  static step s;
  static int something;
  void* stream = &something;
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  latte_machine_info info = LATTE_MACHINE_INFO_INIT;
  latte_device_lengths lengths = LATTE_DEVICE_LENGTHS_INIT;
  latte_metadata metadata = LATTE_METADATA_INIT;
  latte_backend* backend = NULL;
  latte_decode_args args;
  latte_error error = LATTE_ERROR_INIT;
  latte_code code;
  if (!setup(&s, LATTE_MASK_CAUSAL)) return;
  CHECK_CODE(LATTE_OK, latte_backend_info(s.backend, &info, NULL));
  CHECK(!info.on_device && strcmp(info.device, "") == 0 && strcmp(info.driver, "") == 0);
  CHECK_CODE(LATTE_OK, latte_backend_synchronize(s.backend, NULL, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_backend_synchronize(s.backend, stream, &error));
  CHECK(strcmp(error.field, "stream") == 0);
  args = step_args(&s);
  args.stream = stream;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_decode(&s.metadata, &args, &error));
  CHECK(strcmp(error.field, "stream") == 0);
  CHECK_CODE(LATTE_UNSUPPORTED, latte_builder_build_on_device(s.builder, 0, &lengths, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_build_on_device(s.builder, 0, NULL, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_init_workspace(s.builder, NULL, 0, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_builder_init_workspace(NULL, s.out, sizeof s.out, NULL, NULL));

  /* A GPU, or the reason why there is none. */
  options.name = "cuda";
  code = latte_backend_open(&options, &backend, &error);
  if (code == LATTE_OK) {
    latte_machine_info gpu = LATTE_MACHINE_INFO_INIT;
    CHECK_CODE(LATTE_OK, latte_backend_info(backend, &gpu, NULL));
    CHECK(gpu.on_device && strlen(gpu.device) > 0 && strlen(gpu.driver) > 0);
  } else {
    CHECK(code == LATTE_UNSUPPORTED && backend == NULL && strlen(error.got) > 0);
  }
  CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));

  /* The GPU if it opens, else the CPU and why. */
  options.name = "auto";
  CHECK_CODE(LATTE_OK, latte_backend_info(s.backend, &info, NULL));
  CHECK(strcmp(info.note, "") == 0);
  if (CHECK_CODE(LATTE_OK, latte_backend_open(&options, &backend, &error))) {
    CHECK_CODE(LATTE_OK, latte_backend_info(backend, &info, NULL));
    CHECK(info.on_device == (code == LATTE_OK) && (strlen(info.note) == 0) == (code == LATTE_OK));
    CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));
  }
  teardown(&s);
}

typedef struct named_test {
  const char* name;
  void (*run)(void);
} named_test;

static const named_test kTests[] = {
    {"version_and_names", version_and_names},
    {"machine_and_kernels", machine_and_kernels},
    {"ceilings", ceilings},
    {"support", support},
    {"decode_numbers", decode_numbers},
    {"visible_bounds", visible_bounds},
    {"merge_numbers", merge_numbers},
    {"plan_arrays", plan_arrays},
    {"struct_versions", struct_versions},
    {"null_arguments", null_arguments},
    {"policies_and_slots", policies_and_slots},
    {"streams_and_devices", streams_and_devices},
    {"prefill_numbers", prefill_numbers},
    {"prefill_context", prefill_context},
    {"prefill_versions_and_nulls", prefill_versions_and_nulls},
    {"workspace_slices", workspace_slices},
    {"plans_in_a_workspace", plans_in_a_workspace},
    {"reserved_fields", reserved_fields},
    {"handles_after_errors", handles_after_errors},
};

int main(int argc, char** argv) {
  size_t i;
  int ran = 0;
  for (i = 0; i < sizeof kTests / sizeof kTests[0]; ++i) {
    if (argc > 1 && strcmp(argv[1], kTests[i].name) != 0) continue;
    kTests[i].run();
    ++ran;
  }
  printf("%d tests, %d checks, %d failures\n", ran, checks, failures);
  return ran > 0 && checks > 0 && failures == 0 ? 0 : 1;
}
