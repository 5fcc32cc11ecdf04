// The one description of a decode call that tests, `latte check` and `latte bench` share: it yields the problem, a
// name, the work it does and the error it may have. testkit/batch.hpp turns it into memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "latte/problem.hpp"
#include "latte/tensor.hpp"

namespace latte::testkit {

struct RequestLengths {
  std::int32_t query_tokens = 1;
  std::int32_t kv_tokens = 0;
  bool operator==(const RequestLengths&) const = default;
};

enum class QueryForm : std::uint8_t {
  joined,  // one tensor [T, H, latent + rope]
  split,   // as engines have them: q_nope a transposed [H, T, latent], q_pe a slice of [T, H, 128 + rope]
};
enum class PageForm : std::uint8_t { block_table, csr };
enum class Layout : std::uint8_t {
  dense,
  gapped,      // gaps between rows and spare rows at the end, none of which may be touched
  transposed,  // heads outermost in memory
};
// Where a query token's bound comes from.
enum class Bounds : std::uint8_t {
  mask,
  random,  // StepLengths::visible, drawn from the seed
};

enum class Sink : std::uint8_t { none, first, last };

// docs/numerics.md, "Tolerances": out as a relative norm, lse absolute.
struct Tolerance {
  double out = 0;
  double lse = 0;
};

struct DecodeCase {
  std::vector<RequestLengths> requests{};
  std::int32_t heads = 16;
  std::int32_t latent = 512;
  std::int32_t rope = 64;
  std::int32_t page_size = 64;
  KvFormat kv_format = KvFormat::bf16;
  Dtype q_dtype = Dtype::bf16;
  Dtype out_dtype = Dtype::bf16;
  Mask mask = Mask::causal;
  Bounds bounds = Bounds::mask;
  QueryForm query_form = QueryForm::joined;
  PageForm page_form = PageForm::block_table;
  Layout cache_layout = Layout::dense;  // dense or gapped
  Layout out_layout = Layout::dense;
  bool with_lse = true;
  Layout lse_layout = Layout::dense;
  std::int32_t align_bytes = 1;  // strides of gapped tensors are multiples of this; 1 = odd ones
  bool scale_pointers = false;   // fp8 scales by address instead of by value
  float scale = 0;               // 0 = 1 / sqrt(latent + rope)
  float q_scale = 0.75f;         // fp8 q only
  float kv_scale = 0.375f;       // fp8_e4m3 cache only
  float kv_spread = 1;           // how large cached values are; queries are smaller by as much. Not for fp8.
  // Not none: every query scores all tokens alike, but a request's first or last one 8 * scale higher. So nearly all
  // probabilities are the same number, and whatever rounding does to it does not average out.
  Sink sink = Sink::none;
  std::uint64_t seed = 1;
  std::uint64_t page_seed = 0;  // another one puts the same tokens into other pages
  double tolerance_factor = 1;  // of what docs/numerics.md allows

  DecodeProblem problem() const;
  Limits limits(std::int32_t workers = 0) const;
  float softmax_scale() const;
  std::int64_t query_tokens() const;
  std::int64_t kv_tokens() const;
  double kv_token_bytes() const;
  // Visible bounds of every query token; empty when the mask decides.
  std::vector<std::int32_t> visible() const;

  // Everything needed to make the case again, on one line.
  std::string name() const;
  // The requests in the grammar of the benchmarks: 15q1s1024_1q4s100.
  std::string spec() const;

  // 2 * heads * query * kv * (latent + rope + latent), summed over requests; masks do not count.
  double flops() const;
  // The KV tokens of each request once, q and out.
  double bytes() const;
  Tolerance tolerance(double max_abs_score) const;
};

const char* layout_name(Layout layout);
const char* sink_name(Sink sink);

}  // namespace latte::testkit
