// A PrefillCase in memory: random q, k and v, a paged cache for the context, and the outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "latte/prefill.hpp"
#include "testkit/batch.hpp"
#include "testkit/prefill_case.hpp"
#include "testkit/prefill_oracle.hpp"
#include "testkit/tensors.hpp"

namespace latte::testkit {

class PrefillBatch : public BatchOutputs {
 public:
  // NaN in spare tokens behind the last request (gapped layouts), and in k and v of requests without query tokens.
  explicit PrefillBatch(const PrefillCase& description, Fill fill = Fill::checked);

  // The same requests, bit for bit, as another step: `order` lists requests of this batch, and kPadding stands for a
  // request of one query token and no KV. Needs a batch without context.
  static constexpr std::int32_t kPadding = -1;
  PrefillBatch reordered(std::span<const std::int32_t> order) const;
  // The same values in tensors of other layouts.
  PrefillBatch relaid(const PrefillCase& description) const;

  // Takes the queries of a batch with context, and as keys and values its context followed by its own: the same call
  // without a cache.
  void copy_joined(const PrefillBatch& from, const ExpandedContext& context);

  const PrefillCase& description() const { return case_; }
  // Without the hook of the context: see ContextExpander.
  PrefillArgs args() const;
  PrefillLengths lengths() const;
  // One token of a request's context as latent + rope numbers.
  std::vector<double> context_token(std::int32_t request, std::int32_t token) const;

  // Everything args() points into, for copies elsewhere.
  std::vector<Buffer> input_memory() const;

 private:
  struct Input {
    Buffer memory;
    TensorView view;
    std::byte* row(std::int64_t token, std::int64_t head) const;
  };
  void set_lengths();
  Input make_input(Layout layout, std::int64_t tokens, std::int64_t width, Fill fill) const;
  void fill_input(const Input& input, std::int64_t first, std::int64_t end, const ValuePool& pool, Rng& rng) const;
  void oppose() const;
  void score_alike() const;
  void make_context(Fill fill);
  void copy_request(const PrefillBatch& from, std::int32_t source, std::int32_t target);
  Fp8Scale scale_arg(const Buffer& scales, float value) const;

  PrefillCase case_;
  std::int64_t rows_ = 0, kv_rows_ = 0;  // tokens of the tensors, spare ones included
  std::vector<std::int32_t> kv_start_, context_lens_;
  Input q_, k_, v_;
  Buffer q_scales_, k_scales_, v_scales_;  // one number, or [heads]
  std::optional<DecodeBatch> context_;     // its cache and pages hold the context
};

}  // namespace latte::testkit
