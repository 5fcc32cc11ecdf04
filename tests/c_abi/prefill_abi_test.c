/* Prefill, gather_kv and the workspace manager, planning included, from plain C. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"
#include "latte/latte.h"

/* Two prompts of 5 and 3 tokens, 2 heads, fp32; the first has 6 older tokens in pages of 4. */
enum { kTokens = 8, kFirst = 5, kHeads = 2, kQk = 32, kV = 16, kOld = 6, kPage = 4, kPages = 2, kRow = 32 };

typedef struct prompt {
  latte_backend* backend;
  latte_prefill_builder* builder;
  latte_prefill_metadata metadata;
  float q[kTokens * kHeads * kQk];
  float k[kTokens * kHeads * kQk];
  float v[kTokens * kHeads * kV];
  float cache[kPages * kPage * kRow];
  float out[kTokens * kHeads * kV];
  float lse[kTokens * kHeads];
  int32_t block_table[2 * kPages];
  int chunks_seen;
} prompt;

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

static latte_limits prompt_limits(void) {
  latte_limits limits = LATTE_LIMITS_INIT;
  limits.max_requests = 2;
  limits.max_query_tokens = kFirst;
  limits.max_kv_tokens = kFirst;
  return limits;
}

static latte_prefill_problem prompt_problem(const latte_prefill_context* context) {
  latte_prefill_problem problem = LATTE_PREFILL_PROBLEM_INIT;
  problem.heads = kHeads;
  problem.qk_width = kQk;
  problem.v_width = kV;
  problem.dtype = LATTE_F32;
  problem.out_dtype = LATTE_F32;
  problem.context = context;
  return problem;
}

static latte_prefill_context prompt_context(void) {
  latte_prefill_context context = LATTE_PREFILL_CONTEXT_INIT;
  context.latent = kRow - 16;
  context.rope = 16;
  context.kv_format = LATTE_KV_F32;
  context.page_size = kPage;
  context.max_tokens = kOld;
  return context;
}

static latte_code build_prompt(prompt* p, int with_context) {
  static const int32_t starts[3] = {0, kFirst, kTokens}, context_lens[2] = {kOld, 0};
  latte_prefill_lengths lengths = LATTE_PREFILL_LENGTHS_INIT;
  lengths.query_start = starts;
  lengths.query_start_count = 3;
  lengths.kv_start = starts;
  lengths.kv_start_count = 3;
  if (with_context) {
    lengths.context_lens = context_lens;
    lengths.context_lens_count = 2;
  }
  return latte_prefill_builder_build(p->builder, 0, &lengths, &p->metadata, NULL);
}

static int setup(prompt* p, int with_context) {
  latte_backend_options options = LATTE_BACKEND_OPTIONS_INIT;
  latte_prefill_context context = prompt_context();
  latte_prefill_problem problem = prompt_problem(with_context ? &context : NULL);
  latte_limits limits = prompt_limits();
  latte_prefill_metadata fresh = LATTE_PREFILL_METADATA_INIT;
  int i;
  memset(p, 0, sizeof *p);
  p->metadata = fresh;
  options.threads = 2;
  for (i = 0; i < kTokens * kHeads * kQk; ++i) p->q[i] = wave(i, 23);
  for (i = 0; i < kTokens * kHeads * kQk; ++i) p->k[i] = wave(i, 29);
  for (i = 0; i < kTokens * kHeads * kV; ++i) p->v[i] = wave(i, 31);
  for (i = 0; i < kPages * kPage * kRow; ++i) p->cache[i] = wave(i, 37);
  p->block_table[0] = 1; /* not in order */
  p->block_table[2] = -1;
  return CHECK_CODE(LATTE_OK, latte_backend_open(&options, &p->backend, NULL)) &&
         CHECK_CODE(LATTE_OK, latte_prefill_builder_create(p->backend, &problem, &limits, NULL, &p->builder, NULL)) &&
         CHECK_CODE(LATTE_OK, build_prompt(p, with_context));
}

static void teardown(prompt* p) {
  CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(p->builder, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(p->backend, NULL));
}

static const float* old_token(const prompt* p, int i) {
  return p->cache + (p->block_table[i / kPage] * kPage + i % kPage) * kRow;
}

/* Every head's key is the token as the cache has it, its value the first half. */
static latte_code expand(void* user, const latte_context_chunk* chunk, latte_error* error) {
  const float* rows = (const float*)chunk->latent.data;
  float* k = (float*)chunk->k.data;
  float* v = (float*)chunk->v.data;
  int t, head;
  (void)error;
  ++((prompt*)user)->chunks_seen;
  CHECK(chunk->size == sizeof *chunk && chunk->kv_start_count == 3 && chunk->kv_start[1] == chunk->tokens);
  CHECK(chunk->latent.shape[1] == kRow && chunk->k.shape[2] == kQk && chunk->v.shape[2] == kV);
  for (t = 0; t < chunk->tokens; ++t)
    for (head = 0; head < kHeads; ++head) {
      memcpy(k + (t * kHeads + head) * kQk, rows + t * kRow, kQk * sizeof *k);
      memcpy(v + (t * kHeads + head) * kV, rows + t * kRow, kV * sizeof *v);
    }
  return LATTE_OK;
}

static latte_code refuse(void* user, const latte_context_chunk* chunk, latte_error* error) {
  (void)user;
  (void)chunk;
  strcpy(error->field, "weights");
  return LATTE_OUT_OF_MEMORY;
}

static latte_prefill_args prompt_args(prompt* p, int with_context) {
  latte_prefill_args args = latte_prefill_args_init();
  args.scale = 0.5f;
  args.q = tensor3(p->q, kTokens, kHeads, kQk);
  args.k = tensor3(p->k, kTokens, kHeads, kQk);
  args.v = tensor3(p->v, kTokens, kHeads, kV);
  args.out = tensor3(p->out, kTokens, kHeads, kV);
  args.lse = tensor2(p->lse, kTokens, kHeads);
  if (with_context) {
    args.kv_cache = tensor3(p->cache, kPages, kPage, kRow);
    args.block_table = p->block_table;
    args.block_table_stride = kPages;
    args.max_pages = kPages;
    args.expand = expand;
    args.user = p;
  }
  return args;
}

static void add_key(const float* q, const float* k, const float* v, double* sum, double* out) {
  double score = 0, weight;
  int i;
  for (i = 0; i < kQk; ++i) score += (double)q[i] * (double)k[i];
  weight = exp(0.5 * score);
  *sum += weight;
  for (i = 0; i < kV; ++i) out[i] += weight * (double)v[i];
}

/* The textbook, in doubles. */
static void check_rows(const prompt* p, int older) {
  int token, head, i;
  for (token = 0; token < kTokens; ++token)
    for (head = 0; head < kHeads; ++head) {
      const int row = token * kHeads + head, first = token < kFirst ? 0 : kFirst;
      const float* q = p->q + row * kQk;
      double sum = 0, expected[kV];
      memset(expected, 0, sizeof expected);
      for (i = 0; i < (token < kFirst ? older : 0); ++i) add_key(q, old_token(p, i), old_token(p, i), &sum, expected);
      for (i = first; i <= token; ++i)
        add_key(q, p->k + (i * kHeads + head) * kQk, p->v + (i * kHeads + head) * kV, &sum, expected);
      for (i = 0; i < kV; ++i) CHECK(fabs((double)p->out[row * kV + i] - expected[i] / sum) < 1e-5);
      CHECK(fabs((double)p->lse[row] - log(sum)) < 1e-5);
    }
}

void prefill_numbers(void) {
  prompt p;
  latte_prefill_args args;
  latte_prefill_builder_info info = LATTE_PREFILL_BUILDER_INFO_INIT;
  latte_plan plan = LATTE_PLAN_INIT;
  latte_support support = LATTE_SUPPORT_INIT;
  latte_prefill_problem problem = prompt_problem(NULL);
  if (!setup(&p, 0)) return;
  args = prompt_args(&p, 0);
  CHECK_CODE(LATTE_OK, latte_prefill(&p.metadata, &args, NULL));
  check_rows(&p, 0);
  CHECK_CODE(LATTE_OK, latte_prefill_builder_get_info(p.builder, &info, NULL));
  CHECK(info.heads == kHeads && info.workers == 2 && info.math == LATTE_MATH_HALF && info.chunk_tokens == 0);
  CHECK(strlen(info.kernel) > 0 && strlen(info.reason) > 0 && info.max_tiles > 0);
  CHECK_CODE(LATTE_OK, latte_prefill_metadata_plan(&p.metadata, -1, &plan, NULL));
  CHECK(plan.work_info_set_count >= 1 && plan.workers == 2);
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_prefill_metadata_plan(&p.metadata, 0, &plan, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_supports_prefill(p.backend, &problem, &support, NULL));
  CHECK(support.supported == 1 && strlen(support.kernel) > 0);
  problem.qk_width = 100;
  CHECK_CODE(LATTE_OK, latte_backend_supports_prefill(p.backend, &problem, &support, NULL));
  CHECK(support.supported == 0 && strstr(support.reason, "qk_width") != NULL);
  teardown(&p);
}

void prefill_context(void) {
  prompt p;
  latte_prefill_args args;
  latte_error error = LATTE_ERROR_INIT;
  latte_gather_kv_args gather = latte_gather_kv_args_init();
  static const int32_t out_start[3] = {0, 4, 4};
  static const float scale = 2.0f;
  float rows[4 * kRow];
  int i;
  if (!setup(&p, 1)) return;
  CHECK(p.metadata.chunks == 1);
  args = prompt_args(&p, 1);
  CHECK_CODE(LATTE_OK, latte_prefill(&p.metadata, &args, NULL));
  CHECK(p.chunks_seen == 1);
  check_rows(&p, kOld);
  args.expand = refuse;
  CHECK_CODE(LATTE_OUT_OF_MEMORY, latte_prefill(&p.metadata, &args, &error));
  CHECK(strcmp(error.field, "weights") == 0);
  args.expand = NULL;
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill(&p.metadata, &args, &error));
  CHECK(strcmp(error.field, "expand") == 0);
  /* The same builder serves steps without context. */
  CHECK_CODE(LATTE_OK, build_prompt(&p, 0));
  CHECK(p.metadata.chunks == 0);
  CHECK_CODE(LATTE_OK, latte_prefill(&p.metadata, &args, NULL));
  check_rows(&p, 0);

  gather.kv_format = LATTE_KV_F32;
  gather.kv_cache = tensor3(p.cache, kPages, kPage, kRow);
  gather.out = tensor2(rows, 4, kRow);
  gather.block_table = p.block_table;
  gather.block_table_stride = kPages;
  gather.max_pages = kPages;
  gather.out_start = out_start;
  gather.out_start_count = 3;
  gather.first_token = 2;
  gather.tokens = 4;
  CHECK_CODE(LATTE_OK, latte_gather_kv(p.backend, &gather, NULL));
  for (i = 0; i < 4; ++i) CHECK(memcmp(rows + i * kRow, old_token(&p, 2 + i), kRow * sizeof *rows) == 0);
  gather.kv_scale_ptr = &scale; /* a scale that a cache of floats has no use for */
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_gather_kv(p.backend, &gather, &error));
  CHECK(strcmp(error.field, "kv_scale") == 0);
  gather.size = (uint32_t)offsetof(latte_gather_kv_args, kv_scale_ptr); /* of a caller who does not know it yet */
  CHECK_CODE(LATTE_OK, latte_gather_kv(p.backend, &gather, NULL));
  gather.size = sizeof gather;
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_gather_kv(NULL, &gather, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_gather_kv(p.backend, NULL, NULL));
  teardown(&p);
}

void prefill_versions_and_nulls(void) {
  prompt p;
  latte_prefill_args args;
  latte_prefill_problem problem = prompt_problem(NULL);
  latte_prefill_context context = prompt_context();
  latte_limits limits = prompt_limits();
  latte_prefill_builder* builder = NULL;
  latte_prefill_builder_info info = LATTE_PREFILL_BUILDER_INFO_INIT;
  latte_prefill_lengths lengths = LATTE_PREFILL_LENGTHS_INIT;
  latte_prefill_metadata metadata = LATTE_PREFILL_METADATA_INIT;
  latte_support support = LATTE_SUPPORT_INIT;
  latte_plan plan = LATTE_PLAN_INIT;
  latte_error error = LATTE_ERROR_INIT;
  struct {
    latte_prefill_problem known;
    uint64_t news;
  } newer;
  if (!setup(&p, 0)) return;

  /* A caller from before the fp8 scales: the fields behind keep their defaults. */
  args = prompt_args(&p, 0);
  args.size = offsetof(latte_prefill_args, q_scale);
  args.q_scale.value = -1.0f;
  CHECK_CODE(LATTE_OK, latte_prefill(&p.metadata, &args, NULL));
  check_rows(&p, 0);
  args.size = 8;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_prefill(&p.metadata, &args, &error));
  CHECK(strcmp(error.field, "args.size") == 0);
  /* A newer caller: fine as long as what this library does not know is zero. */
  memset(&newer, 0, sizeof newer);
  newer.known = problem;
  newer.known.size = sizeof newer;
  CHECK_CODE(LATTE_OK, latte_prefill_builder_create(p.backend, &newer.known, &limits, NULL, &builder, NULL));
  CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(builder, NULL));
  newer.news = 1;
  CHECK_CODE(LATTE_UNSUPPORTED, latte_prefill_builder_create(p.backend, &newer.known, &limits, NULL, &builder, &error));
  CHECK(strcmp(error.field, "problem.size") == 0 && builder == NULL);
  problem.context = &context;
  context.size = 3;
  CHECK_CODE(LATTE_INVALID_ARGUMENT,
             latte_prefill_builder_create(p.backend, &problem, &limits, NULL, &builder, &error));
  CHECK(strcmp(error.field, "context.size") == 0);
  problem.context = NULL;
  problem.math = 3;
  CHECK_CODE(LATTE_INVALID_ARGUMENT,
             latte_prefill_builder_create(p.backend, &problem, &limits, NULL, &builder, &error));
  CHECK(strcmp(error.field, "math") == 0);
  /* Only as much is written as the caller has room for. */
  info.size = offsetof(latte_prefill_builder_info, kernel);
  info.reason = "mine";
  CHECK_CODE(LATTE_OK, latte_prefill_builder_get_info(p.builder, &info, NULL));
  CHECK(info.row_tile > 0 && strcmp(info.reason, "mine") == 0);

  problem.math = LATTE_MATH_AUTOMATIC;
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_create(NULL, &problem, &limits, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_create(p.backend, NULL, &limits, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_create(p.backend, &problem, NULL, NULL, &builder, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_create(p.backend, &problem, &limits, NULL, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_get_info(NULL, &info, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_get_info(p.builder, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_build(NULL, 0, &lengths, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_build(p.builder, 0, NULL, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_build(p.builder, 0, &lengths, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_build(p.builder, 0, &lengths, &metadata, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_init_workspace(NULL, p.out, sizeof p.out, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_builder_init_workspace(p.builder, NULL, 0, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_metadata_plan(NULL, -1, &plan, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_prefill_metadata_plan(&metadata, -1, &plan, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill_metadata_plan(&p.metadata, -1, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill(NULL, &args, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_prefill(&p.metadata, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports_prefill(p.backend, NULL, &support, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_backend_supports_prefill(p.backend, &problem, NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(NULL, NULL));
  teardown(&p);
}

void workspace_slices(void) {
  latte_backend* backend = NULL;
  latte_workspace* workspace = NULL;
  latte_workspace_slice decode = LATTE_WORKSPACE_SLICE_INIT, prefill = LATTE_WORKSPACE_SLICE_INIT;
  latte_workspace_need needs[2];
  latte_error error = LATTE_ERROR_INIT;
  memset(needs, 0, sizeof needs);
  needs[0].name = "decode";
  needs[0].bytes = 1000;
  needs[0].phases = 1;
  needs[1].name = "prefill";
  needs[1].bytes = 500;
  needs[1].phases = 2;
  if (!CHECK_CODE(LATTE_OK, latte_backend_open(NULL, &backend, NULL))) return;
  CHECK_CODE(LATTE_OK, latte_workspace_create(backend, needs, 2, LATTE_CHECKS_ON, &workspace, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_take(workspace, 0, &decode, NULL));
  CHECK(decode.data != NULL && decode.bytes == 1000 && decode.need == 0);
  memset(decode.data, 1, decode.bytes);
  CHECK_CODE(LATTE_OK, latte_workspace_check(workspace, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_take(workspace, 1, &prefill, &error));
  CHECK(strcmp(error.field, "prefill") == 0 && strstr(error.got, "decode") != NULL);
  CHECK_CODE(LATTE_OK, latte_workspace_give_back(workspace, &decode, NULL));
  CHECK_CODE(LATTE_STALE_METADATA, latte_workspace_give_back(workspace, &decode, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_take(workspace, 1, &prefill, NULL));
  ((char*)prefill.data)[prefill.bytes] = 1;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_check(workspace, &error));
  CHECK(strcmp(error.field, "prefill") == 0);
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_take(workspace, 2, &decode, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_take(NULL, 0, &decode, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_take(workspace, 0, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_give_back(workspace, NULL, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_check(NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_destroy(workspace, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_destroy(NULL, NULL));
  needs[1].alignment = 3;
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_create(backend, needs, 2, LATTE_CHECKS_OFF, &workspace, &error));
  CHECK(strcmp(error.field, "needs[1].alignment") == 0 && workspace == NULL);
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_create(backend, needs, 1, 3, &workspace, NULL));
  CHECK_CODE(LATTE_INVALID_ARGUMENT, latte_workspace_create(backend, needs, -1, 0, &workspace, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_create(backend, NULL, 1, 0, &workspace, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_create(NULL, needs, 1, 0, &workspace, NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT, latte_workspace_create(backend, needs, 1, 0, NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_backend_close(backend, NULL));
}

/* Planning and prefill from one workspace. */
void plans_in_a_workspace(void) {
  prompt p;
  latte_prefill_args args;
  latte_prefill_context context = prompt_context();
  latte_prefill_problem problem = prompt_problem(&context);
  latte_problem decode_problem = LATTE_PROBLEM_INIT;
  latte_limits limits = prompt_limits();
  latte_builder_options options = LATTE_BUILDER_OPTIONS_INIT;
  latte_workspace_need needs[2], decode_needs[2];
  latte_workspace* workspace = NULL;
  latte_workspace_slice plan = LATTE_WORKSPACE_SLICE_INIT, scratch = LATTE_WORKSPACE_SLICE_INIT;
  latte_plan made = LATTE_PLAN_INIT;
  latte_error error = LATTE_ERROR_INIT;
  const char* first;
  if (!setup(&p, 1)) return;
  CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(p.builder, NULL));
  p.builder = NULL;
  options.own_workspace = 0;
  CHECK_CODE(LATTE_OK, latte_prefill_builder_needs(p.backend, &problem, &limits, &options, &needs[0], &needs[1], NULL));
  CHECK(needs[0].bytes > 0 && needs[0].alignment == 256 && strcmp(needs[0].name, "prefill plan") == 0);
  CHECK_CODE(LATTE_OK, latte_workspace_create(p.backend, needs, 2, LATTE_CHECKS_ON, &workspace, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_take(workspace, 0, &plan, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_take(workspace, 1, &scratch, NULL));
  options.plan_memory = plan.data;
  options.plan_memory_bytes = plan.bytes - 1;
  CHECK_CODE(LATTE_INVALID_ARGUMENT,
             latte_prefill_builder_create(p.backend, &problem, &limits, &options, &p.builder, &error));
  CHECK(strcmp(error.field, "options.plan_memory") == 0 && p.builder == NULL);
  options.plan_memory_bytes = plan.bytes;
  if (CHECK_CODE(LATTE_OK, latte_prefill_builder_create(p.backend, &problem, &limits, &options, &p.builder, NULL))) {
    CHECK_CODE(LATTE_OK, build_prompt(&p, 1));
    CHECK_CODE(LATTE_OK, latte_prefill_metadata_plan(&p.metadata, 0, &made, NULL));
    first = (const char*)made.work_meta_data;
    CHECK(first >= (const char*)plan.data && first < (const char*)plan.data + plan.bytes);
    args = prompt_args(&p, 1);
    args.workspace = scratch.data;
    args.workspace_bytes = scratch.bytes;
    CHECK_CODE(LATTE_OK, latte_prefill(&p.metadata, &args, NULL));
    check_rows(&p, kOld);
    CHECK_CODE(LATTE_OK, latte_workspace_check(workspace, NULL));
    CHECK_CODE(LATTE_OK, latte_prefill_builder_destroy(p.builder, NULL));
    p.builder = NULL;
  }
  /* A caller from before plan_memory: what lies behind its struct is nobody's business. */
  options.size = offsetof(latte_builder_options, plan_memory);
  options.plan_memory_bytes = 1;
  options.own_workspace = 1;
  CHECK_CODE(LATTE_OK, latte_prefill_builder_create(p.backend, &problem, &limits, &options, &p.builder, NULL));

  CHECK_CODE(LATTE_MISSING_ARGUMENT,
             latte_prefill_builder_needs(NULL, &problem, &limits, NULL, &needs[0], &needs[1], NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT,
             latte_prefill_builder_needs(p.backend, NULL, &limits, NULL, &needs[0], &needs[1], NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT,
             latte_prefill_builder_needs(p.backend, &problem, &limits, NULL, NULL, &needs[1], NULL));
  decode_problem.heads = kHeads;
  CHECK_CODE(LATTE_OK,
             latte_builder_needs(p.backend, &decode_problem, &limits, NULL, &decode_needs[0], &decode_needs[1], NULL));
  CHECK(decode_needs[0].bytes > 0 && decode_needs[1].bytes > 0 && strcmp(decode_needs[0].name, "decode plan") == 0);
  CHECK_CODE(LATTE_MISSING_ARGUMENT,
             latte_builder_needs(p.backend, &decode_problem, NULL, NULL, &decode_needs[0], &decode_needs[1], NULL));
  CHECK_CODE(LATTE_MISSING_ARGUMENT,
             latte_builder_needs(p.backend, &decode_problem, &limits, NULL, &decode_needs[0], NULL, NULL));
  CHECK_CODE(LATTE_OK, latte_workspace_destroy(workspace, NULL));
  teardown(&p);
}
