#include <cmath>
#include <cstdio>
#include <vector>

#include <latte/latte.hpp>

int main() {  // One request of 100 tokens, 16 heads. Even tokens are all ones, odd ones all zeros, unused slots NaN.
  std::vector<float> q(16 * 576, std::log(3.0f)), cache(2 * 64 * 576, NAN), out(16 * 512);
  for (std::size_t i = 0; i < 100 * 576; ++i) cache[i] = i / 576 % 2 == 0 ? 1.0f : 0.0f;
  const std::int32_t pages[] = {0, 1}, seq_lens[] = {100}, query_start[] = {0, 1};
  using enum latte::Dtype;
  latte::Backend backend = latte::Backend::open().value();
  latte::DecodeProblem problem{.heads = 16, .q_dtype = f32, .out_dtype = f32, .kv_format = latte::KvFormat::f32};
  auto builder = latte::MetadataBuilder::create(backend, problem, {.max_requests = 1, .max_kv_tokens = 100}).value();
  auto step = builder.build(0, {.seq_lens = seq_lens, .query_start = query_start}).value();
  latte::Status status = latte::decode(step, {.q = latte::dense(q.data(), f32, {1, 16, 576}),
                                              .kv_cache = latte::dense(cache.data(), f32, {2, 64, 576}),
                                              .pages = {.block_table = pages, .block_table_stride = 2, .max_pages = 2},
                                              .out = latte::dense(out.data(), f32, {1, 16, 512}),
                                              .scale = 1.0f / 576});
  bool right = status.ok();
  for (float x : out) right = right && std::abs(x - 0.75f) < 1e-5f;  // a one weighs e^(ln 3) = 3, a zero 1: 3 / (3 + 1)
  return std::puts(right ? "every output is 0.75" : status.ok() ? "wrong" : status.message().c_str()), right ? 0 : 1;
}
