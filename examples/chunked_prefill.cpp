// A long prompt in chunks: 600 older tokens lie in a paged cache as latents, 40 new ones come expanded. One call
// gathers the old ones chunk by chunk, has us project them up to keys and values, and joins everything. The result is
// compared with one prefill over all 640 tokens at once.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include <latte/latte.hpp>

namespace {

using enum latte::Dtype;

constexpr int kHeads = 4, kNope = 128, kRope = 64, kV = 128, kQk = kNope + kRope, kLatent = 128, kRow = kLatent + kRope;
constexpr int kOld = 600, kNew = 40, kAll = kOld + kNew, kPageSize = 64, kPages = (kOld + kPageSize - 1) / kPageSize;

std::vector<float> random_values(std::size_t count, float spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// The layer's up-projection: k_nope = W_UK c and v = W_UV c for every head; the rope part is shared by all heads.
struct UpProjection {
  std::vector<float> w_uk = random_values(std::size_t{kHeads} * kNope * kLatent, 0.1f, 1);
  std::vector<float> w_uv = random_values(std::size_t{kHeads} * kV * kLatent, 0.1f, 2);

  // `row` is a token as the cache has it: latent, then rope.
  void token(const float* row, float* k, float* v) const {
    const auto project = [&](const std::vector<float>& weight, int head, int width, int i) {
      const float* w = weight.data() + (std::size_t(head) * width + i) * kLatent;
      float sum = 0;
      for (int j = 0; j < kLatent; ++j) sum += w[j] * row[j];
      return sum;
    };
    for (int head = 0; head < kHeads; ++head) {
      for (int i = 0; i < kNope; ++i) k[head * kQk + i] = project(w_uk, head, kNope, i);
      std::copy_n(row + kLatent, kRope, k + head * kQk + kNope);
      for (int i = 0; i < kV; ++i) v[head * kV + i] = project(w_uv, head, kV, i);
    }
  }
};

// readme:begin
// Called once a chunk. On a GPU this would queue two matrix products in chunk.stream.
latte::Status expand(void* user, const latte::ContextChunk& chunk) {
  const auto& layer = *static_cast<const UpProjection*>(user);
  const auto* rows = static_cast<const float*>(chunk.latent.data);
  auto* k = static_cast<float*>(chunk.k.data);
  auto* v = static_cast<float*>(chunk.v.data);
  for (std::int64_t t = 0; t < chunk.tokens; ++t)
    layer.token(rows + t * kRow, k + t * kHeads * kQk, v + t * kHeads * kV);
  return {};
}
// readme:end

float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;  // NaN too
  }
  return largest;
}

}  // namespace

int main() {
  const latte::Backend cpu = latte::Backend::open().value();
  UpProjection layer;
  const std::vector<float> tokens = random_values(std::size_t{kAll} * kRow, 1, 3);
  const std::vector<float> q = random_values(std::size_t{kNew} * kHeads * kQk, 1, 4);
  std::vector<float> k(std::size_t{kAll} * kHeads * kQk), v(std::size_t{kAll} * kHeads * kV);
  for (int t = 0; t < kAll; ++t)
    layer.token(&tokens[std::size_t(t) * kRow], &k[std::size_t(t) * kHeads * kQk], &v[std::size_t(t) * kHeads * kV]);
  const float scale = 1 / std::sqrt(float{kQk});

  // At once: 40 queries at the end of 640 keys.
  std::vector<float> whole(std::size_t{kNew} * kHeads * kV), chunked(whole.size());
  std::vector<float> whole_lse(std::size_t{kNew} * kHeads), chunked_lse(whole_lse.size());
  latte::PrefillProblem problem{.heads = kHeads, .dtype = f32, .out_dtype = f32};
  const std::int32_t query_start[] = {0, kNew}, all_start[] = {0, kAll}, new_start[] = {0, kNew};
  auto at_once =
      latte::PrefillBuilder::create(cpu, problem, {.max_requests = 1, .max_query_tokens = kNew, .max_kv_tokens = kAll})
          .value();
  latte::PrefillArgs args{.q = latte::dense(q.data(), f32, {kNew, kHeads, kQk}),
                          .k = latte::dense(k.data(), f32, {kAll, kHeads, kQk}),
                          .v = latte::dense(v.data(), f32, {kAll, kHeads, kV}),
                          .out = latte::dense(whole.data(), f32, {kNew, kHeads, kV}),
                          .lse = latte::dense(whole_lse.data(), f32, {kNew, kHeads}),
                          .scale = scale};
  auto step = at_once.build(0, {.query_start = query_start, .kv_start = all_start}).value();
  if (const latte::Status status = latte::prefill(step, args); !status) {
    std::puts(status.message().c_str());
    return 1;
  }

  // In chunks: the older tokens come from the cache, whose pages lie in no order.
  std::vector<float> cache(std::size_t{kPages} * kPageSize * kRow, NAN);
  std::vector<std::int32_t> pages(kPages);
  for (int page = 0; page < kPages; ++page) pages[std::size_t(page)] = kPages - 1 - page;
  for (int t = 0; t < kOld; ++t) {
    const std::size_t slot = std::size_t(pages[std::size_t(t / kPageSize)]) * kPageSize + std::size_t(t % kPageSize);
    std::copy_n(&tokens[std::size_t(t) * kRow], kRow, &cache[slot * kRow]);
  }
  problem.context = latte::PrefillContext{.latent = kLatent,
                                          .rope = kRope,
                                          .kv_format = latte::KvFormat::f32,
                                          .page_size = kPageSize,
                                          .max_tokens = kOld,
                                          .workspace_bytes = 2 << 20};
  auto builder =
      latte::PrefillBuilder::create(cpu, problem, {.max_requests = 1, .max_query_tokens = kNew, .max_kv_tokens = kNew})
          .value();
  const std::int32_t context_lens[] = {kOld};
  step = builder.build(0, {.query_start = query_start, .kv_start = new_start, .context_lens = context_lens}).value();
  args.k = latte::dense(k.data() + std::size_t{kOld} * kHeads * kQk, f32, {kNew, kHeads, kQk});
  args.v = latte::dense(v.data() + std::size_t{kOld} * kHeads * kV, f32, {kNew, kHeads, kV});
  args.out = latte::dense(chunked.data(), f32, {kNew, kHeads, kV});
  args.lse = latte::dense(chunked_lse.data(), f32, {kNew, kHeads});
  args.kv_cache = latte::dense(cache.data(), f32, {kPages, kPageSize, kRow});
  args.pages = {.block_table = pages.data(), .block_table_stride = kPages, .max_pages = kPages};
  args.expand = expand;
  args.user = &layer;
  if (const latte::Status status = latte::prefill(step, args); !status) {
    std::puts(status.message().c_str());
    return 1;
  }
  const float worst = std::max(largest_difference(whole, chunked), largest_difference(whole_lse, chunked_lse));
  const bool right = worst < 1e-4f && step.chunks() > 1;
  std::printf("%d older tokens in %d chunks of at most %d: %s, largest difference %.1e\n", kOld, step.chunks(),
              builder.chunk_tokens(), right ? "the same as at once" : "wrong", static_cast<double>(worst));
  return right ? 0 : 1;
}
