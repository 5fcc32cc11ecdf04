// Words on their way from the host to a device.
#include "backend/cuda/impl.hpp"
#include "backend/errors.hpp"

namespace latte::backend {
namespace {

constexpr std::size_t kCloseWords = 4096;  // a gap that costs less to copy than another copy costs to issue

}  // namespace

StagedWords::~StagedWords() {
  for (const Half& half : halves_)
    if (half.uploaded != nullptr) device_.release_event(half.uploaded);
}

Status StagedWords::allocate(std::int32_t* on_device, std::size_t words) {
  on_device_ = on_device;
  for (Half& half : halves_) {
    LATTE_RETURN_IF_ERROR(half.words.allocate(device_, words * sizeof(std::int32_t), cuda::Memory::pinned));
    auto event = device_.make_event(false);
    if (!event.ok()) return event.status();
    half.uploaded = *event;
  }
  return {};
}

Status StagedWords::stage(Stream stream) {
  const auto capturing = device_.capturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (*capturing)
    return unsupported("stream", "one that is not being captured: a graph would replay this step's lengths for ever",
                       "one that is (a decode plan made by build_on_device can be captured)");
  half_ = 1 - half_;
  Half& half = halves_[half_];
  if (half.in_flight) LATTE_RETURN_IF_ERROR(device_.wait(half.uploaded));
  half.in_flight = false;
  return {};
}

Status StagedWords::upload(std::span<const Range> ranges, Stream stream) {
  const auto copy = [&](std::size_t begin, std::size_t end) {
    return device_.copy(on_device() + begin, staged() + begin, (end - begin) * sizeof(std::int32_t),
                        cuda::Copy::to_device, stream);
  };
  // Ranges that lie close together go in one copy.
  std::size_t begin = 0, end = 0;
  for (const auto& [first, last] : ranges) {
    if (first == last) continue;
    if (begin == end) begin = first;
    if (end > begin && first > end + kCloseWords) {
      LATTE_RETURN_IF_ERROR(copy(begin, end));
      begin = first;
    }
    end = last;
  }
  if (begin != end) LATTE_RETURN_IF_ERROR(copy(begin, end));
  Half& half = halves_[half_];
  LATTE_RETURN_IF_ERROR(device_.record(half.uploaded, stream));
  half.in_flight = true;
  return {};
}

}  // namespace latte::backend
