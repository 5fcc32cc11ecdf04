// A DecodeCase in memory: random inputs in a shuffled paged cache, and the outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "latte/decode.hpp"
#include "testkit/case.hpp"
#include "testkit/tensors.hpp"

namespace latte::testkit {

class DecodeBatch : public BatchOutputs {
 public:
  explicit DecodeBatch(const DecodeCase& description, Fill fill = Fill::checked);

  // The same requests (cache, pages and query rows shared or copied bit for bit) as another step: `order` lists
  // requests of this batch, and kPadding stands for a request of one query token and no KV. Needs joined q and no
  // bounds.
  static constexpr std::int32_t kPadding = -1;
  DecodeBatch reordered(std::span<const std::int32_t> order) const;

  const DecodeCase& description() const { return case_; }
  DecodeArgs args() const;
  StepLengths lengths() const;

  // Everything args() points into, for copies elsewhere.
  std::vector<Buffer> input_memory() const { return {cache_, table_, indptr_, q_, q_nope_, q_pe_, scales_}; }

 private:
  struct Pages {
    std::vector<std::vector<std::int32_t>> of_request;
    std::int32_t count = 0;
  };

  void set_lengths();
  void assign_pages(Rng& rng, Fill fill);
  void make_cache(Rng& rng, Fill fill);
  void make_page_table(Rng& rng, Fill fill);
  void make_query(Rng& rng, Fill fill);
  std::byte* query_row(std::int64_t token, std::int64_t head) const;

  DecodeCase case_;
  std::int64_t rows_ = 0;  // T: the query tokens and, in gapped layouts, spare rows behind them
  std::vector<std::int32_t> seq_lens_, visible_;
  Pages pages_;
  Buffer cache_, table_, indptr_, q_, q_nope_, q_pe_, scales_;
  TensorView cache_view_, q_view_, q_nope_view_, q_pe_view_;
  std::int64_t table_columns_ = 0, table_stride_ = 0;
};

}  // namespace latte::testkit
