// One engine step with both kinds of work: two requests that decode a token each, and two prompts that prefill. The two
// builders plan once a step. Everything comes from one workspace, which is sized before there is a builder: the plans,
// which stay, and the scratch of the two calls, which share memory, as one ends before the next one begins. The results
// are compared with a plain loop.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include <latte/latte.hpp>

namespace {

using enum latte::Dtype;

constexpr int kHeads = 3, kLatent = 64, kRope = 32, kRow = kLatent + kRope;  // decode, absorbed
constexpr int kQk = 96, kV = 64;                                             // prefill, expanded
constexpr int kPageSize = 16, kPages = 8;

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// softmax(scale * q K^T) V of one row over `keys` keys; key(i) and value(i) point to them.
template <class Key, class Value>
std::vector<double> plain_row(const float* q, int qk_width, int v_width, int keys, float scale, Key key, Value value) {
  std::vector<double> out(static_cast<std::size_t>(v_width));
  double total = 0;
  for (int i = 0; i < keys; ++i) {
    double score = 0;
    for (int j = 0; j < qk_width; ++j) score += double{q[j]} * key(i)[j];
    const double weight = std::exp(scale * score);
    total += weight;
    for (int j = 0; j < v_width; ++j) out[std::size_t(j)] += weight * value(i)[j];
  }
  for (double& x : out) x /= total;
  return out;
}

bool close(const float* row, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!(std::abs(row[i] - expected[i]) < 1e-4)) return false;
  return true;
}

const latte::DecodeProblem kDecodes{.heads = kHeads,
                                    .latent = kLatent,
                                    .rope = kRope,
                                    .q_dtype = f32,
                                    .out_dtype = f32,
                                    .kv_format = latte::KvFormat::f32,
                                    .page_size = kPageSize};
constexpr latte::Limits kDecodeLimits{.max_requests = 8, .max_kv_tokens = 64};
const latte::PrefillProblem kPrefills{.heads = kHeads, .qk_width = kQk, .v_width = kV, .dtype = f32, .out_dtype = f32};
constexpr latte::Limits kPrefillLimits{.max_requests = 4, .max_query_tokens = 64, .max_kv_tokens = 64};

// What the engine keeps from step to step: one piece of memory, and how requests of either kind are planned in it.
struct Engine {
  enum Need : std::int32_t { kDecodePlan, kPrefillPlan, kDecode, kPrefill };

  latte::Backend backend = latte::Backend::open().value();
  latte::Workspace workspace = make_workspace();  // before the builders, whose plans lie in it
  latte::MetadataBuilder decodes =
      latte::MetadataBuilder::create(backend, kDecodes, kDecodeLimits, plans_in(kDecodePlan)).value();
  latte::PrefillBuilder prefills =
      latte::PrefillBuilder::create(backend, kPrefills, kPrefillLimits, plans_in(kPrefillPlan)).value();

  latte::Workspace make_workspace() const {
    auto decode = latte::MetadataBuilder::needs(backend, kDecodes, kDecodeLimits).value();
    auto prefill = latte::PrefillBuilder::needs(backend, kPrefills, kPrefillLimits).value();
    decode.workspace.phases = 1;
    prefill.workspace.phases = 2;
    const latte::WorkspaceNeed needs[] = {decode.plan, prefill.plan, decode.workspace, prefill.workspace};
    return latte::Workspace::create(backend, needs, {.checks = latte::WorkspaceChecks::on}).value();
  }
  // A slice that is never given back.
  latte::BuilderOptions plans_in(Need need) {
    return {.own_workspace = false, .plan_memory = workspace.take(need).value().bytes};
  }

  // One layer of one step. Scratch that somebody else wrote to is made ready first: on a GPU a small memset, queued.
  latte::Status run(const latte::DecodeMetadata& decode_step, latte::DecodeArgs decode_args,
                    const latte::PrefillMetadata& prefill_step, latte::PrefillArgs prefill_args) {
    auto slice = workspace.take(kDecode);
    if (!slice) return slice.status();
    if (auto status = decodes.init_workspace(slice->bytes, decode_args.stream); !status) return status;
    decode_args.workspace = slice->bytes;
    if (auto status = latte::decode(decode_step, decode_args); !status) return status;
    if (auto status = workspace.give_back(*slice); !status) return status;

    slice = workspace.take(kPrefill);
    if (!slice) return slice.status();
    if (auto status = prefills.init_workspace(slice->bytes, prefill_args.stream); !status) return status;
    prefill_args.workspace = slice->bytes;
    if (auto status = latte::prefill(prefill_step, prefill_args); !status) return status;
    if (auto status = workspace.give_back(*slice); !status) return status;
    return workspace.check();  // of the plans' slices
  }
};

}  // namespace

int main() {
  Engine engine;
  const float scale = 0.1f;

  // Two requests with 20 and 37 tokens in the cache, one new token each.
  const std::int32_t seq_lens[] = {20, 37}, decode_start[] = {0, 1, 2};
  const std::int32_t block_table[] = {5, 2, -1, 0, 7, 3};
  const auto dq = random_values(2 * kHeads * kRow, 1), cache = random_values(kPages * kPageSize * kRow, 2);
  std::vector<float> decoded(2 * kHeads * kLatent, NAN);
  const latte::DecodeArgs decode_args{.q = latte::dense(dq.data(), f32, {2, kHeads, kRow}),
                                      .kv_cache = latte::dense(cache.data(), f32, {kPages, kPageSize, kRow}),
                                      .pages = {.block_table = block_table, .block_table_stride = 3, .max_pages = 3},
                                      .out = latte::dense(decoded.data(), f32, {2, kHeads, kLatent}),
                                      .scale = scale};

  // Two prompts of 50 and 7 tokens.
  const std::int32_t prompt_start[] = {0, 50, 57};
  const auto q = random_values(57 * kHeads * kQk, 3), k = random_values(57 * kHeads * kQk, 4);
  const auto v = random_values(57 * kHeads * kV, 5);
  std::vector<float> out(57 * kHeads * kV, NAN);
  const latte::PrefillArgs prefill_args{.q = latte::dense(q.data(), f32, {57, kHeads, kQk}),
                                        .k = latte::dense(k.data(), f32, {57, kHeads, kQk}),
                                        .v = latte::dense(v.data(), f32, {57, kHeads, kV}),
                                        .out = latte::dense(out.data(), f32, {57, kHeads, kV}),
                                        .scale = scale};

  // Planned once; every layer of the model then runs with the same metadata.
  const auto decode_step = engine.decodes.build(0, {.seq_lens = seq_lens, .query_start = decode_start}).value();
  const auto prefill_step = engine.prefills.build(0, {.query_start = prompt_start, .kv_start = prompt_start}).value();
  if (const latte::Status status = engine.run(decode_step, decode_args, prefill_step, prefill_args); !status) {
    std::puts(status.message().c_str());
    return 1;
  }

  bool right = true;
  for (int request = 0; request < 2; ++request)
    for (int head = 0; head < kHeads; ++head) {
      const auto token = [&](int i) {
        const int page = block_table[request * 3 + i / kPageSize];
        return &cache[std::size_t((page * kPageSize + i % kPageSize) * kRow)];
      };
      const int row = request * kHeads + head;
      right = right &&
              close(&decoded[std::size_t(row * kLatent)],
                    plain_row(&dq[std::size_t(row * kRow)], kRow, kLatent, seq_lens[request], scale, token, token));
    }
  for (int request = 0; request < 2; ++request)
    for (int t = prompt_start[request]; t < prompt_start[request + 1]; ++t)
      for (int head = 0; head < kHeads; ++head) {
        const auto at = [&](const std::vector<float>& tensor, int width) {
          return [&tensor, first = prompt_start[request], width, head](int i) {
            return &tensor[std::size_t(((first + i) * kHeads + head) * width)];
          };
        };
        const int row = t * kHeads + head;
        right = right && close(&out[std::size_t(row * kV)],
                               plain_row(&q[std::size_t(row * kQk)], kQk, kV, t - prompt_start[request] + 1, scale,
                                         at(k, kQk), at(v, kV)));
      }
  std::printf("2 decoded tokens and 2 prompts in %zu bytes of memory: %s\n", engine.workspace.bytes(),
              right ? "as in a plain loop" : "wrong");
  return right ? 0 : 1;
}
