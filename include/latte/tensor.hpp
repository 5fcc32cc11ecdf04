// Views of memory that somebody else owns: a pointer, a dtype, a shape and free strides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace latte {

enum class Dtype : std::uint8_t { f32, bf16, f16, fp8_e4m3, u8 };

std::size_t dtype_bytes(Dtype dtype);
const char* dtype_name(Dtype dtype);

inline constexpr int kMaxRank = 4;

// Work queue of a device, opaque: for cuda a cudaStream_t. The CPU backend has none and takes only null.
using Stream = void*;

// What fp8 numbers are multiplied with: value = stored * scale. One number for a tensor or, only for q, k and v of
// prefill, one for each head. From 2^-126 up and finite: below that numbers have fewer digits.
struct Fp8Scale {
  float value = 1;
  const float* ptr = nullptr;  // read at run time instead of `value`, where the tensors are: one number, or [heads]
  bool per_head = false;       // needs ptr
};

// Strides count elements, not bytes. `Byte` is std::byte or const std::byte.
template <class Byte>
struct BasicTensorView {
  using Pointer = std::conditional_t<std::is_const_v<Byte>, const void*, void*>;

  Pointer data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int32_t rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  bool empty() const { return data == nullptr; }
  Byte* bytes() const { return static_cast<Byte*>(data); }
};

using TensorView = BasicTensorView<std::byte>;

struct ConstTensorView : BasicTensorView<const std::byte> {
  ConstTensorView() = default;
  ConstTensorView(const BasicTensorView<const std::byte>& view) : BasicTensorView<const std::byte>(view) {}
  ConstTensorView(const TensorView& view)
      : BasicTensorView<const std::byte>{view.data, view.dtype, view.rank, view.shape, view.stride} {}
};

namespace detail {
template <class View, class Pointer>
View dense_view(Pointer data, Dtype dtype, std::initializer_list<std::int64_t> shape) {
  View view;
  view.data = data;
  view.dtype = dtype;
  for (std::int64_t extent : shape)
    if (view.rank < kMaxRank) view.shape[static_cast<std::size_t>(view.rank++)] = extent;
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.stride[static_cast<std::size_t>(axis)] = stride;
    stride *= view.shape[static_cast<std::size_t>(axis)];
  }
  return view;
}
}  // namespace detail

// Row-major views without gaps.
inline TensorView dense(void* data, Dtype dtype, std::initializer_list<std::int64_t> shape) {
  return detail::dense_view<TensorView>(data, dtype, shape);
}
inline ConstTensorView dense(const void* data, Dtype dtype, std::initializer_list<std::int64_t> shape) {
  return detail::dense_view<ConstTensorView>(data, dtype, shape);
}

}  // namespace latte
