// What a caller does with a chunk of the context: checks the latent rows that arrive and makes keys and values of them.
#pragma once

#include <cstdint>
#include <string>

#include "latte/prefill.hpp"
#include "testkit/prefill_batch.hpp"
#include "testkit/prefill_oracle.hpp"

namespace latte::testkit {

// The projection: every column of a head's nope part and of v is half the sum of four latent values with signs, and
// k's last columns are the rope part, the same for all heads. Runs on the host; for a device rows are copied to it and
// back, which waits for the stream.
class ContextExpander {
 public:
  ContextExpander(const Backend& backend, const PrefillBatch& batch);

  // Sets the hook in `args` if the batch has context; this object must outlive the call.
  void attach(PrefillArgs& args);
  // Starts over, for another run.
  void reset();
  // An error unless every context token that a query sees came by exactly once, in order.
  Status finished() const;
  std::int32_t chunks() const { return chunks_; }
  // Keys and values as they were stored.
  const ExpandedContext& expanded() const { return expanded_; }

 private:
  static Status expand(void* user, const ContextChunk& chunk);
  Status expand(const ContextChunk& chunk);
  Status check(const ContextChunk& chunk) const;
  Status expand_token(std::int32_t request, const double* latent, const TensorView& k, const TensorView& v,
                      std::int64_t row);

  const Backend& backend_;
  const PrefillBatch& batch_;
  ExpandedContext expanded_;
  std::int32_t chunks_ = 0;
};

}  // namespace latte::testkit
