/* A decode through the C interface: every call is checked, and so is the result. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <latte/latte.h>

enum { kHeads = 16, kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kPage = 64, kPages = 2, kTokens = 100 };

static latte_error error = LATTE_ERROR_INIT;

static void require(latte_code code, const char* call) {
  if (code == LATTE_OK) return;
  fprintf(stderr, "%s: %s: %s: expected %s, got %s\n", call, latte_code_name(code), error.field, error.expected,
          error.got);
  exit(1);
}

int main(void) {
  static float q[kHeads * kWidth], cache[kPages * kPage * kWidth], out[kHeads * kLatent], lse[kHeads];
  const int64_t q_shape[] = {1, kHeads, kWidth}, cache_shape[] = {kPages, kPage, kWidth};
  const int64_t out_shape[] = {1, kHeads, kLatent}, lse_shape[] = {1, kHeads};
  const int32_t seq_lens[] = {kTokens}, query_start[] = {0, 1}, pages[] = {1, 0};

  /* Even tokens are all ones, odd ones all zeros. The request's first 64 tokens lie in page 1, the rest in page 0. */
  for (int i = 0; i < kHeads * kWidth; ++i) q[i] = logf(3.0f);
  for (int token = 0; token < kTokens; token += 2) {
    float* slot = cache + (pages[token / kPage] * kPage + token % kPage) * kWidth;
    for (int i = 0; i < kWidth; ++i) slot[i] = 1.0f;
  }

  latte_backend* backend = NULL;
  require(latte_backend_open(NULL, &backend, &error), "latte_backend_open");

  latte_problem problem = LATTE_PROBLEM_INIT;
  problem.heads = kHeads;
  problem.q_dtype = LATTE_F32;
  problem.out_dtype = LATTE_F32;
  problem.kv_format = LATTE_KV_F32;
  latte_limits limits = LATTE_LIMITS_INIT;
  limits.max_requests = 1;
  limits.max_kv_tokens = kTokens;
  latte_builder* builder = NULL;
  require(latte_builder_create(backend, &problem, &limits, NULL, &builder, &error), "latte_builder_create");

  latte_lengths lengths = LATTE_LENGTHS_INIT;
  lengths.seq_lens = seq_lens;
  lengths.seq_lens_count = 1;
  lengths.query_start = query_start;
  lengths.query_start_count = 2;
  latte_metadata step = LATTE_METADATA_INIT;
  require(latte_builder_build(builder, 0, &lengths, &step, &error), "latte_builder_build");

  latte_decode_args args = latte_decode_args_init();
  args.scale = 1.0f / kWidth;
  args.q = latte_dense(q, LATTE_F32, 3, q_shape);
  args.kv_cache = latte_dense(cache, LATTE_F32, 3, cache_shape);
  args.out = latte_dense(out, LATTE_F32, 3, out_shape);
  args.lse = latte_dense(lse, LATTE_F32, 2, lse_shape);
  args.block_table = pages;
  args.block_table_stride = kPages;
  args.max_pages = kPages;
  require(latte_decode(&step, &args, &error), "latte_decode");

  require(latte_builder_destroy(builder, &error), "latte_builder_destroy");
  require(latte_backend_close(backend, &error), "latte_backend_close");

  /* A one weighs e^(ln 3) = 3 and a zero 1: every output is 3 / (3 + 1), every LSE ln(50 * 3 + 50 * 1). */
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kLatent; ++i) {
      if (fabsf(out[head * kLatent + i] - 0.75f) < 1e-5f) continue;
      fprintf(stderr, "out[%d][%d] is %.8g, not 0.75\n", head, i, out[head * kLatent + i]);
      return 1;
    }
    if (fabsf(lse[head] - logf(200.0f)) < 1e-4f) continue;
    fprintf(stderr, "lse[%d] is %.8g, not %.8g\n", head, lse[head], logf(200.0f));
    return 1;
  }
  printf("latte %s: every output is 0.75\n", latte_version());
  return 0;
}
