#include "testkit/context_expander.hpp"

#include <algorithm>
#include <cmath>

#include "latte/device.hpp"
#include "testkit/codec.hpp"

namespace latte::testkit {
namespace {

constexpr int kTerms = 4;

Status wrong(std::string field, std::string expected, std::string got) {
  return {Code::internal, "context chunk: " + std::move(field), std::move(expected), std::move(got)};
}

std::int64_t bytes_of(const ConstTensorView& view) {
  std::int64_t elements = 1;
  for (int axis = 0; axis < view.rank; ++axis) elements *= view.shape[static_cast<std::size_t>(axis)];
  return elements * static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

bool is_dense(const ConstTensorView& view) {
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (view.stride[static_cast<std::size_t>(axis)] != stride) return false;
    stride *= view.shape[static_cast<std::size_t>(axis)];
  }
  return true;
}

// Column `column` of a head's projection.
double project(const double* latent, std::int32_t width, std::int32_t head, std::int64_t column) {
  Rng rng(static_cast<std::uint64_t>(head) << 32 | static_cast<std::uint64_t>(column));
  double sum = 0;
  for (int i = 0; i < kTerms; ++i) {
    const double value = latent[rng.between(0, width - 1)];
    sum += rng.chance(2) ? value : -value;
  }
  return sum / 2;
}

// Stores a value divided by its scale where the tensor is fp8, and returns what the memory then holds.
double put(const TensorView& view, std::int64_t offset, double value, double scale) {
  std::byte* at = view.bytes() + offset * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  store(view.dtype, view.dtype == Dtype::fp8_e4m3 ? value / scale : value, at);
  return load(view.dtype, at);
}

}  // namespace

ContextExpander::ContextExpander(const Backend& backend, const PrefillBatch& batch) : backend_(backend), batch_(batch) {
  reset();
}

void ContextExpander::attach(PrefillArgs& args) {
  if (batch_.description().context_tokens() == 0) return;
  args.expand = &ContextExpander::expand;
  args.user = this;
}

void ContextExpander::reset() {
  chunks_ = 0;
  expanded_.requests.assign(batch_.description().requests.size(), {});
}

Status ContextExpander::finished() const {
  const auto& requests = batch_.description().requests;
  for (std::size_t b = 0; b < requests.size(); ++b)
    if (requests[b].query_tokens > 0 && expanded_.requests[b].tokens != requests[b].context_tokens)
      return wrong("tokens of request " + std::to_string(b), std::to_string(requests[b].context_tokens),
                   std::to_string(expanded_.requests[b].tokens));
  return {};
}

Status ContextExpander::expand(void* user, const ContextChunk& chunk) {
  return static_cast<ContextExpander*>(user)->expand(chunk);
}

Status ContextExpander::check(const ContextChunk& chunk) const {
  const PrefillCase& c = batch_.description();
  if (chunk.index != chunks_) return wrong("index", std::to_string(chunks_), std::to_string(chunk.index));
  if (chunk.kv_start.size() != c.requests.size() + 1 || chunk.kv_start.front() != 0 ||
      chunk.kv_start.back() != chunk.tokens)
    return wrong("kv_start", "prefix sums of all requests, up to the chunk's tokens", "something else");
  const auto has_shape = [](const ConstTensorView& view, std::initializer_list<std::int64_t> shape) {
    return view.rank == static_cast<std::int32_t>(shape.size()) &&
           std::equal(shape.begin(), shape.end(), view.shape.begin());
  };
  if (!has_shape(chunk.latent, {chunk.tokens, c.latent + c.rope}) ||
      !has_shape(chunk.k, {chunk.tokens, c.heads, c.qk_width}) ||
      !has_shape(chunk.v, {chunk.tokens, c.heads, c.v_width}))
    return wrong("shapes", "latent [tokens, latent + rope], k and v [tokens, heads, width]", "others");
  if (backend_.on_device() && !(is_dense(chunk.latent) && is_dense(chunk.k) && is_dense(chunk.v)))
    return wrong("strides", "dense tensors, to copy them whole", "others");
  return {};
}

Status ContextExpander::expand(const ContextChunk& chunk) {
  if (Status status = check(chunk); !status) return status;
  ConstTensorView latent = chunk.latent;
  TensorView k = chunk.k, v = chunk.v;
  std::vector<std::byte> latent_copy, k_copy, v_copy;
  if (backend_.on_device()) {
    latent_copy.resize(static_cast<std::size_t>(bytes_of(latent)));
    k_copy.resize(static_cast<std::size_t>(bytes_of(k)));
    v_copy.resize(static_cast<std::size_t>(bytes_of(v)));
    if (Status status = copy_to_host(backend_, latent_copy.data(), latent.data, latent_copy.size(), chunk.stream);
        !status)
      return status;
    latent.data = latent_copy.data();
    k.data = k_copy.data();
    v.data = v_copy.data();
  }

  const PrefillCase& c = batch_.description();
  std::vector<double> row(static_cast<std::size_t>(c.latent + c.rope));
  for (std::int32_t b = 0; b < static_cast<std::int32_t>(c.requests.size()); ++b)
    for (std::int64_t t = chunk.kv_start[b]; t < chunk.kv_start[b + 1]; ++t) {
      load_row(latent.dtype,
               latent.bytes() + t * latent.stride[0] * static_cast<std::int64_t>(dtype_bytes(latent.dtype)),
               c.latent + c.rope, row.data());
      if (Status status = expand_token(b, row.data(), k, v, t); !status) return status;
    }
  ++chunks_;
  if (!backend_.on_device()) return {};
  if (Status status = copy_to_device(backend_, chunk.k.data, k_copy.data(), k_copy.size(), chunk.stream); !status)
    return status;
  return copy_to_device(backend_, chunk.v.data, v_copy.data(), v_copy.size(), chunk.stream);
}

Status ContextExpander::expand_token(std::int32_t request, const double* latent, const TensorView& k,
                                     const TensorView& v, std::int64_t row) {
  const PrefillCase& c = batch_.description();
  ExpandedContext::Request& seen = expanded_.requests[static_cast<std::size_t>(request)];
  if (seen.tokens >= c.requests[static_cast<std::size_t>(request)].context_tokens)
    return wrong("tokens of request " + std::to_string(request), std::to_string(seen.tokens), "more");
  const std::vector<double> want = batch_.context_token(request, seen.tokens);
  for (std::size_t i = 0; i < want.size(); ++i)  // the cache's numbers, rounded to 8 bits or more
    if (!(std::fabs(latent[i] - want[i]) <= std::ldexp(std::fabs(want[i]), -8)))
      return wrong("latent of token " + std::to_string(seen.tokens) + " of request " + std::to_string(request),
                   std::to_string(want[i]), std::to_string(latent[i]));
  ++seen.tokens;

  const PrefillArgs args = batch_.args();
  const std::int64_t nope = c.qk_width - c.rope;
  for (std::int32_t head = 0; head < c.heads; ++head) {
    const double k_scale = scale_of(args.k_scale, head), v_scale = scale_of(args.v_scale, head);
    const std::int64_t k_row = row * k.stride[0] + head * k.stride[1], v_row = row * v.stride[0] + head * v.stride[1];
    for (std::int64_t d = 0; d < c.qk_width; ++d) {
      const double value = d < nope ? project(latent, c.latent, head, d) : latent[c.latent + d - nope];
      seen.k.push_back(put(k, k_row + d, value, k_scale));
    }
    for (std::int64_t d = 0; d < c.v_width; ++d)
      seen.v.push_back(put(v, v_row + d, project(latent, c.latent, head, c.qk_width + d), v_scale));
  }
  return {};
}

}  // namespace latte::testkit
