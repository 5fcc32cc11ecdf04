#include "testkit/grid.hpp"

#include <algorithm>
#include <cmath>

#include "testkit/rng.hpp"

namespace latte::testkit {
namespace {

constexpr std::int32_t kHeads[] = {1, 3, 8, 12, 16, 24, 48, 64, 100, 128};
constexpr std::int32_t kPageSizes[] = {1, 7, 16, 64, 100, 128};
constexpr std::int32_t kMaxQueryTokens = 9;
constexpr KvFormat kFormats[] = {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3,
                                 KvFormat::fp8_ds_mla};
constexpr Dtype kFloats[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
constexpr Layout kLayouts[] = {Layout::dense, Layout::gapped, Layout::transposed};

struct Widths {
  std::int32_t latent, rope;
};
constexpr Widths kWidths[] = {{512, 64}, {256, 64}, {48, 16}, {80, 48}, {16, 16}, {240, 112}};

// Oracle and scalar kernel spend about 2 kFLOP on each (query row, KV token) pair.
constexpr std::int64_t kRandomRowTokens = 60'000;
constexpr std::uint64_t kFixedRandomCases = 119;
// Every seventh: coprime to the number of heads, query lengths, pages and formats, so each of them stays in the sample.
constexpr std::size_t kQuickStep = 7;

// The dtype engines use beside a cache format.
Dtype usual_dtype(KvFormat format) {
  switch (format) {
    case KvFormat::f16: return Dtype::f16;
    case KvFormat::f32: return Dtype::f32;
    case KvFormat::bf16:
    case KvFormat::fp8_e4m3:
    case KvFormat::fp8_ds_mla: break;
  }
  return Dtype::bf16;
}

DecodeCase usual_case(KvFormat format) {
  return {.kv_format = format, .q_dtype = usual_dtype(format), .out_dtype = usual_dtype(format)};
}

// Everything about a case that is not its shape or its numbers' formats.
void choose_forms(DecodeCase& c, Rng& rng) {
  c.query_form = rng.chance(2) ? QueryForm::split : QueryForm::joined;
  c.page_form = rng.chance(2) ? PageForm::csr : PageForm::block_table;
  c.cache_layout = rng.chance(3) ? Layout::gapped : Layout::dense;
  c.out_layout = rng.pick(kLayouts);
  c.lse_layout = rng.pick(kLayouts);
  c.with_lse = !rng.chance(6);
  c.scale_pointers = rng.chance(2);
  c.mask = rng.chance(3) ? Mask::none : Mask::causal;
  c.bounds = rng.chance(6) ? Bounds::random : Bounds::mask;
  // Sharp softmax now and then: the running maximum moves often and most weights vanish.
  if (rng.chance(4)) c.scale = static_cast<float>(4.0 / std::sqrt(static_cast<double>(c.latent + c.rope)));
}

class GridBuilder {
 public:
  void add(DecodeCase c) {
    c.seed = 1000 + cases_.size();
    cases_.push_back(std::move(c));
  }
  void add_with_forms(DecodeCase c) {
    Rng rng(7000 + cases_.size());
    choose_forms(c, rng);
    add(std::move(c));
  }
  std::vector<DecodeCase> take() { return std::move(cases_); }

 private:
  std::vector<DecodeCase> cases_;
};

void add_heads_by_query_length(GridBuilder& grid) {
  std::size_t index = 0;
  for (std::int32_t heads : kHeads) {
    for (std::int32_t query = 1; query <= kMaxQueryTokens; ++query, ++index) {
      DecodeCase c = usual_case(kFormats[index % std::size(kFormats)]);
      c.heads = heads;
      c.page_size = kPageSizes[index % std::size(kPageSizes)];
      c.requests = {{query, query + static_cast<std::int32_t>(index % 97)}, {query, 65}, {query, 129 + query * 13}};
      grid.add_with_forms(std::move(c));
    }
  }
}

void add_page_edges_by_format(GridBuilder& grid) {
  std::int32_t query = 1;
  for (std::int32_t page : kPageSizes) {
    for (KvFormat format : kFormats) {
      DecodeCase c = usual_case(format);
      c.heads = 8;
      c.page_size = page;
      for (std::int32_t kv : {0, 1, page - 1, page, page + 1, 2 * page + 1, 300}) c.requests.push_back({query, kv});
      query = query % 3 + 1;
      grid.add_with_forms(std::move(c));
    }
  }
}

void add_dtypes(GridBuilder& grid) {
  for (KvFormat format : kFormats) {
    std::vector<Dtype> q_dtypes(std::begin(kFloats), std::end(kFloats));
    if (format == KvFormat::fp8_e4m3) q_dtypes.insert(q_dtypes.begin(), Dtype::fp8_e4m3);
    for (Dtype q_dtype : q_dtypes) {
      for (Dtype out_dtype : kFloats) {
        DecodeCase c{.heads = 12, .kv_format = format, .q_dtype = q_dtype, .out_dtype = out_dtype};
        c.requests = {{2, 150}, {1, 129}};
        grid.add_with_forms(std::move(c));
      }
    }
  }
}

void add_widths(GridBuilder& grid) {
  for (const Widths& widths : kWidths) {
    for (KvFormat format : kFormats) {
      if (format == KvFormat::fp8_ds_mla) continue;
      DecodeCase c = usual_case(format);
      c.latent = widths.latent;
      c.rope = widths.rope;
      c.page_size = 16;
      c.requests = {{1, 210}, {3, 77}};
      for (std::int32_t heads : {3, 24}) {  // kernels may have products of their own for a few rows
        c.heads = heads;
        grid.add_with_forms(c);
      }
    }
  }
}

// What is left of rows when they are computed four or eight at a time.
void add_few_rows(GridBuilder& grid) {
  for (std::int32_t heads = 1; heads <= 24; ++heads) {
    for (KvFormat format : {KvFormat::bf16, KvFormat::f16}) {
      DecodeCase c = usual_case(format);
      c.heads = heads;
      c.requests = {{1, 70 + heads * 5}};
      grid.add_with_forms(std::move(c));
    }
  }
}

// Mixed query lengths, requests without a query, without KV, and with fewer KV tokens than queries.
void add_forms(GridBuilder& grid) {
  for (Layout layout : kLayouts)
    for (QueryForm query_form : {QueryForm::joined, QueryForm::split})
      for (PageForm page_form : {PageForm::block_table, PageForm::csr})
        for (std::int32_t bound = 0; bound < 3; ++bound) {
          DecodeCase c;
          c.requests = {{1, 40}, {0, 33}, {6, 130}, {4, 0}, {5, 3}, {9, 9}, {0, 0}, {2, 64}};
          c.heads = 12;
          c.page_size = 16;
          c.query_form = query_form;
          c.page_form = page_form;
          c.out_layout = c.lse_layout = layout;
          c.cache_layout = layout == Layout::gapped ? Layout::gapped : Layout::dense;
          c.mask = bound == 1 ? Mask::none : Mask::causal;
          c.bounds = bound == 2 ? Bounds::random : Bounds::mask;
          grid.add(std::move(c));
        }
}

void add_long_requests(GridBuilder& grid) {
  for (KvFormat format : kFormats) {
    DecodeCase c = usual_case(format);
    c.requests = {{1, 31}, {1, 4500}, {2, 17}, {1, 1000}};
    grid.add_with_forms(std::move(c));
    c.heads = 1;
    c.requests = {{1, 12'345}};
    grid.add_with_forms(std::move(c));
    c.heads = 128;
    c.requests = {{1, 2049}};
    grid.add_with_forms(std::move(c));
  }
  // A batch that has no row to compute, and one of many tiny requests.
  DecodeCase c;
  c.requests = {{0, 0}, {0, 100}};
  grid.add(c);
  c.heads = 8;
  c.requests.assign(70, {1, 5});
  grid.add(c);
}

// Probabilities of 0.5018 and of 0.5021: bf16 has nothing between 0.5 and 0.5039.
void add_sinks(GridBuilder& grid) {
  for (KvFormat format : {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_ds_mla})
    for (std::int32_t heads : {3, 16, 48, 64, 128})
      for (double probability : {0.5018, 0.5021}) {
        DecodeCase c = usual_case(format);
        Rng rng(60 + static_cast<std::uint64_t>(heads));
        choose_forms(c, rng);
        c.heads = heads;
        c.sink = Sink::first;
        c.scale = static_cast<float>(-std::log(probability) / 8);
        c.requests = {{1, 1500}, {2, 700}};
        grid.add(std::move(c));
      }
}

}  // namespace

DecodeCase random_case(std::uint64_t seed) {
  Rng rng(seed);
  DecodeCase c = usual_case(rng.pick(kFormats));
  c.seed = seed;
  if (c.kv_format != KvFormat::fp8_ds_mla && rng.chance(3)) {
    c.latent = 16 * rng.between(1, 40);
    c.rope = 16 * rng.between(1, 8);
  }
  choose_forms(c, rng);
  if (rng.chance(4)) c.out_dtype = rng.pick(kFloats);
  if (rng.chance(4)) c.q_dtype = rng.pick(kFloats);
  if (c.kv_format == KvFormat::fp8_e4m3 && rng.chance(3)) c.q_dtype = Dtype::fp8_e4m3;
  c.kv_scale = static_cast<float>(0.25 + rng.uniform());
  c.q_scale = static_cast<float>(0.25 + rng.uniform());
  c.heads = rng.chance(2) ? rng.pick(kHeads) : rng.between(1, 128);
  c.page_size = rng.chance(2) ? rng.pick(kPageSizes) : rng.between(1, 200);

  std::int64_t budget = kRandomRowTokens;
  const std::int32_t count = rng.chance(3) ? 1 : rng.between(1, 12);
  for (std::int32_t b = 0; b < count; ++b) {
    const std::int32_t query = rng.chance(2) ? 1 : rng.between(0, kMaxQueryTokens);
    const std::int64_t row_tokens = rng.chance(3) ? budget : budget / 8;
    const auto longest =
        static_cast<std::int32_t>(std::min<std::int64_t>(row_tokens / (c.heads * std::max(1, query)), 6000));
    const std::int32_t kv = rng.between(0, std::max(0, longest));
    c.requests.push_back({query, kv});
    budget -= static_cast<std::int64_t>(c.heads) * query * kv;
  }
  return c;
}

std::vector<DecodeCase> case_grid(GridSize size) {
  GridBuilder grid;
  add_heads_by_query_length(grid);
  add_page_edges_by_format(grid);
  add_dtypes(grid);
  add_widths(grid);
  add_few_rows(grid);
  add_forms(grid);
  add_long_requests(grid);
  add_sinks(grid);
  for (std::uint64_t seed = 1; seed <= kFixedRandomCases; ++seed) grid.add(random_case(seed));
  std::vector<DecodeCase> cases = grid.take();
  if (size == GridSize::full) return cases;
  std::vector<DecodeCase> sample;
  for (std::size_t i = 0; i < cases.size(); i += kQuickStep) sample.push_back(std::move(cases[i]));
  return sample;
}

}  // namespace latte::testkit
