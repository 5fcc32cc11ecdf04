#include "testkit/prefill_grid.hpp"

#include <algorithm>
#include <cmath>

#include "testkit/rng.hpp"

namespace latte::testkit {
namespace {

constexpr std::int32_t kHeads[] = {1, 3, 16, 24, 128};
constexpr std::int32_t kEdges[] = {0, 1, 63, 64, 65, 127, 128, 129};  // around tiles of 64 and 128
constexpr Dtype kDtypes[] = {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::fp8_e4m3};
constexpr Dtype kFloats[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
constexpr Layout kLayouts[] = {Layout::dense, Layout::gapped, Layout::transposed};
constexpr ScaleForm kScaleForms[] = {ScaleForm::value, ScaleForm::pointer, ScaleForm::per_head};
constexpr PrefillMath kMaths[] = {PrefillMath::automatic, PrefillMath::half, PrefillMath::fp8};
constexpr KvFormat kFormats[] = {KvFormat::bf16, KvFormat::f16, KvFormat::f32, KvFormat::fp8_e4m3,
                                 KvFormat::fp8_ds_mla};

struct Widths {
  std::int32_t qk, v;
};
constexpr Widths kWidths[] = {{192, 128}, {128, 128}, {256, 256}, {256, 128}, {64, 64}, {80, 48}, {16, 16}, {112, 240}};

// Oracle and scalar kernel spend about 640 FLOP on each pair of a query row and a KV token.
constexpr double kCasePairs = 400'000;
constexpr std::uint64_t kFixedRandomCases = 83;
// Every fifth: coprime to what the loops below step over.
constexpr std::size_t kQuickStep = 5;

Dtype usual_out(Dtype dtype) { return dtype == Dtype::fp8_e4m3 ? Dtype::bf16 : dtype; }

PrefillCase usual_case(Dtype dtype) { return {.dtype = dtype, .out_dtype = usual_out(dtype)}; }

// Everything about a case that is not its shape or its numbers' formats.
void choose_forms(PrefillCase& c, Rng& rng) {
  c.q_layout = rng.pick(kLayouts);
  c.k_layout = rng.pick(kLayouts);
  c.v_layout = rng.pick(kLayouts);
  c.out_layout = rng.pick(kLayouts);
  c.lse_layout = rng.pick(kLayouts);
  c.with_lse = !rng.chance(6);
  c.mask = rng.chance(3) ? Mask::none : Mask::causal;
  c.scale_form = rng.pick(kScaleForms);
  c.outliers = rng.chance(5);
  c.opposed = rng.chance(5);
  // Quantising on entry is for 16-bit tensors; elsewhere automatic or half.
  const bool sixteen = c.dtype == Dtype::bf16 || c.dtype == Dtype::f16;
  c.math = sixteen || c.dtype == Dtype::fp8_e4m3 ? rng.pick(kMaths) : PrefillMath::automatic;
  // Sharp softmax now and then: the running maximum moves often and most weights vanish.
  if (rng.chance(4)) c.scale = static_cast<float>(4.0 / std::sqrt(static_cast<double>(c.qk_width)));
}

class GridBuilder {
 public:
  void add(PrefillCase c) {
    c.seed = 1000 + cases_.size();
    cases_.push_back(std::move(c));
  }
  void add_with_forms(PrefillCase c) {
    Rng rng(9000 + cases_.size());
    choose_forms(c, rng);
    add(std::move(c));
  }
  std::vector<PrefillCase> take() { return std::move(cases_); }

 private:
  std::vector<PrefillCase> cases_;
};

// Prompts as long as their KV at every edge, as many in a step as the oracle has time for.
void add_heads_by_length(GridBuilder& grid) {
  std::size_t index = 0;
  for (std::int32_t heads : kHeads)
    for (std::int32_t length : kEdges) {
      PrefillCase c = usual_case(kDtypes[index % std::size(kDtypes)]);
      c.heads = heads;
      c.requests = {{length, length}};
      for (std::int32_t other : {65, 1, 17})
        if (c.heads * (c.visible_pairs() + other * other) < kCasePairs) c.requests.push_back({other, other});
      grid.add_with_forms(std::move(c));
      ++index;
    }
}

// Query shorter than KV, and longer: rows that see nothing.
void add_unequal_lengths(GridBuilder& grid) {
  const std::vector<std::vector<PrefillRequest>> steps = {
      {{1, 129}, {63, 200}, {64, 128}, {2, 3}},
      {{129, 1}, {70, 69}, {65, 0}, {128, 64}},
      {{127, 300}, {0, 65}, {64, 63}, {0, 0}},
      {{1, 0}, {1, 1}, {3, 1}, {5, 640}},
      {{256, 257}, {255, 1}},
      {{65, 1100}},
      {{255, 255}, {256, 256}, {257, 257}},
  };
  std::size_t index = 0;
  for (const auto& requests : steps)
    for (std::int32_t heads : {1, 3, 5})
      for (Mask mask : {Mask::causal, Mask::none}) {
        PrefillCase c = usual_case(kDtypes[index++ % std::size(kDtypes)]);
        c.heads = heads;
        c.requests = requests;
        Rng rng(500 + index);
        choose_forms(c, rng);
        c.mask = mask;
        grid.add(std::move(c));
      }
}

void add_dtypes(GridBuilder& grid) {
  for (Dtype dtype : kDtypes)
    for (Dtype out_dtype : kFloats)
      for (PrefillMath math : kMaths) {
        if (dtype == Dtype::f32 && math == PrefillMath::fp8) continue;
        PrefillCase c{.heads = 3, .dtype = dtype, .out_dtype = out_dtype};
        c.requests = {{70, 150}, {33, 33}};
        Rng rng(700 + static_cast<std::uint64_t>(dtype) * 10 + static_cast<std::uint64_t>(out_dtype));
        choose_forms(c, rng);
        c.math = math;
        grid.add(std::move(c));
      }
}

void add_widths(GridBuilder& grid) {
  for (const Widths& widths : kWidths)
    for (Dtype dtype : kDtypes) {
      PrefillCase c = usual_case(dtype);
      c.heads = 2;
      c.qk_width = widths.qk;
      c.v_width = widths.v;
      c.requests = {{77, 210}, {66, 66}};
      grid.add_with_forms(std::move(c));
    }
}

void add_layouts(GridBuilder& grid) {
  for (Layout inputs : kLayouts)
    for (Layout out : kLayouts)
      for (bool with_lse : {true, false}) {
        PrefillCase c;
        c.heads = 3;
        c.requests = {{40, 40}, {0, 33}, {66, 130}, {4, 0}, {5, 3}, {2, 64}};
        c.q_layout = c.k_layout = c.v_layout = inputs;
        c.out_layout = c.lse_layout = out;
        c.with_lse = with_lse;
        grid.add(std::move(c));
      }
}

void add_scales(GridBuilder& grid) {
  for (ScaleForm form : kScaleForms)
    for (PrefillMath math : kMaths)
      for (bool outliers : {false, true}) {
        PrefillCase c = usual_case(Dtype::fp8_e4m3);
        c.heads = 5;
        c.requests = {{100, 130}, {64, 64}};
        c.scale_form = form;
        c.math = math;
        c.outliers = outliers;
        grid.add(std::move(c));
      }
}

void add_context(GridBuilder& grid) {
  std::size_t index = 0;
  for (KvFormat format : kFormats)
    for (Dtype dtype : kDtypes) {
      PrefillCase c = usual_case(dtype);
      c.heads = 2;
      c.kv_format = format;
      if (format == KvFormat::fp8_ds_mla) c.latent = 512, c.rope = 64;
      c.page_size = index % 2 == 0 ? 16 : 7;
      c.page_form = index % 3 == 0 ? PageForm::csr : PageForm::block_table;
      c.requests = {{40, 40, 150}, {33, 20, 0}, {1, 1, 301}, {0, 5, 9}, {65, 65, 1}, {3, 0, 17}};
      Rng rng(40 + index++);
      choose_forms(c, rng);
      grid.add(std::move(c));
    }
}

void add_long_requests(GridBuilder& grid) {
  for (Dtype dtype : kDtypes) {
    PrefillCase c = usual_case(dtype);
    c.heads = 3;
    c.requests = {{65, 5000}, {7, 7}};
    grid.add_with_forms(std::move(c));
    c.heads = 16;
    c.requests = {{1, 5000}};
    grid.add_with_forms(std::move(c));
    c.heads = 128;
    c.requests = {{2, 700}, {30, 30}};
    grid.add_with_forms(std::move(c));
  }
  PrefillCase c;
  c.heads = 1;
  c.requests = {{5000, 5000}};
  grid.add(c);
  // A batch that has no row to compute, and one of many tiny requests.
  c.requests = {{0, 0}, {0, 100}};
  grid.add(c);
  c.heads = 8;
  c.requests.assign(70, {3, 5});
  grid.add(c);
}

// Probabilities of 0.5018 and of 0.5021: bf16 has nothing between 0.5 and 0.5039. The last token is the sink of kernels
// that begin with it.
void add_sinks(GridBuilder& grid) {
  for (Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32})
    for (Sink sink : {Sink::first, Sink::last})
      for (double probability : {0.5018, 0.5021}) {
        PrefillCase c = usual_case(dtype);
        c.heads = 3;
        c.sink = sink;
        c.mask = sink == Sink::first ? Mask::causal : Mask::none;
        c.scale = static_cast<float>(-std::log(probability) / 8);
        c.requests = {{130, 900}, {70, 600}};
        grid.add(std::move(c));
      }
}

}  // namespace

PrefillCase random_prefill_case(std::uint64_t seed) {
  Rng rng(seed);
  PrefillCase c = usual_case(rng.pick(kDtypes));
  c.seed = seed;
  if (rng.chance(3)) {
    c.qk_width = 16 * rng.between(1, 16);
    c.v_width = 16 * rng.between(1, 16);
  }
  choose_forms(c, rng);
  if (rng.chance(4)) c.out_dtype = rng.pick(kFloats);
  for (float* scale : {&c.q_scale, &c.k_scale, &c.v_scale}) *scale = static_cast<float>(0.25 + rng.uniform());
  c.heads = rng.chance(2) ? rng.pick(kHeads) : rng.between(1, 40);
  const bool context = c.qk_width >= 64 && rng.chance(4);
  if (context) {
    c.kv_format = rng.pick(kFormats);
    const bool ds_mla = c.kv_format == KvFormat::fp8_ds_mla;
    c.latent = ds_mla ? 512 : 16 * rng.between(1, 12);
    c.rope = ds_mla ? 64 : 16 * rng.between(1, 4);
    c.page_size = rng.between(1, 70);
    c.page_form = rng.chance(2) ? PageForm::csr : PageForm::block_table;
    c.kv_scale = static_cast<float>(0.25 + rng.uniform());
  }

  double budget = kCasePairs / c.heads;
  const std::int32_t count = rng.chance(3) ? 1 : rng.between(1, 8);
  for (std::int32_t b = 0; b < count; ++b) {
    const double pairs = std::max(0.0, rng.chance(3) ? budget : budget / 6);
    // The longest prompt this request may have, and yet every head count meets the edges.
    const auto square = static_cast<std::int32_t>(std::sqrt(pairs));
    PrefillRequest request;
    request.query_tokens = b == 0 && rng.chance(3) ? rng.pick(kEdges) : rng.between(0, square);
    const double longest = std::min(pairs / std::max(1, request.query_tokens), 6000.0);
    request.kv_tokens = rng.chance(3) ? request.query_tokens : rng.between(0, static_cast<std::int32_t>(longest));
    if (context && rng.chance(2)) request.context_tokens = rng.between(1, 200);
    budget -= static_cast<double>(request.query_tokens) * (request.kv_tokens + request.context_tokens);
    c.requests.push_back(request);
  }
  return c;
}

std::vector<PrefillCase> prefill_grid(GridSize size) {
  GridBuilder grid;
  add_heads_by_length(grid);
  add_unequal_lengths(grid);
  add_dtypes(grid);
  add_widths(grid);
  add_layouts(grid);
  add_scales(grid);
  add_context(grid);
  add_long_requests(grid);
  add_sinks(grid);
  for (std::uint64_t seed = 1; seed <= kFixedRandomCases; ++seed) grid.add(random_prefill_case(seed));
  std::vector<PrefillCase> cases = grid.take();
  if (size == GridSize::full) return cases;
  std::vector<PrefillCase> sample;
  for (std::size_t i = 0; i < cases.size(); i += kQuickStep) sample.push_back(std::move(cases[i]));
  return sample;
}

}  // namespace latte::testkit
