#include "latte/workspace.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "backend/errors.hpp"
#include "backend/impl.hpp"
#include "core/within_memory.hpp"
#include "latte/device.hpp"

namespace latte {
namespace {

constexpr std::size_t kBaseAlignment = 256;
// As wide as the largest alignment, so that what lies between two guards stays aligned.
constexpr std::size_t kGuardBytes = kBaseAlignment;
constexpr std::byte kGuardByte{0xC7};
// The sum of as many as there may be is far from 2^64.
constexpr std::size_t kMaxNeedBytes = std::size_t{1} << 52;
constexpr std::size_t kMaxNeeds = 1024;
#ifdef NDEBUG
constexpr bool kDebugBuild = false;
#else
constexpr bool kDebugBuild = true;
#endif

std::size_t round_up_to(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

Status check_need(const WorkspaceNeed& need, std::size_t index) {
  const auto field = [&](const char* name) { return "needs[" + backend::text(index) + "]." + name; };
  if (need.bytes > kMaxNeedBytes)
    return backend::invalid(field("bytes"), "at most " + backend::text(kMaxNeedBytes), backend::text(need.bytes));
  if (!std::has_single_bit(need.alignment) || need.alignment > kBaseAlignment)
    return backend::invalid(field("alignment"), "a power of two up to " + backend::text(kBaseAlignment),
                            backend::text(need.alignment));
  if (need.phases == 0) return backend::invalid(field("phases"), "at least one phase", "none");
  return {};
}

bool share_a_phase(const WorkspaceNeed& a, const WorkspaceNeed& b) { return (a.phases & b.phases) != 0; }

bool overlap(std::size_t begin_a, std::size_t bytes_a, std::size_t begin_b, std::size_t bytes_b) {
  return begin_a < begin_b + bytes_b && begin_b < begin_a + bytes_a;
}

}  // namespace

// Largest first, each at the lowest place where it meets none that lives at the same time: large needs of different
// phases come to lie on one another, small ones fill what is left.
Result<WorkspaceLayout> lay_out_workspace(std::span<const WorkspaceNeed> needs) {
  return within_memory([&]() -> Result<WorkspaceLayout> {
    if (needs.size() > kMaxNeeds)
      return backend::invalid("needs", "at most " + backend::text(kMaxNeeds), backend::text(needs.size()));
    for (std::size_t i = 0; i < needs.size(); ++i) LATTE_RETURN_IF_ERROR(check_need(needs[i], i));

    std::vector<std::size_t> order(needs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return needs[a].bytes > needs[b].bytes; });
    WorkspaceLayout layout;
    layout.offsets.assign(needs.size(), 0);
    for (std::size_t rank = 0; rank < order.size(); ++rank) {
      const WorkspaceNeed& need = needs[order[rank]];
      const std::span<const std::size_t> placed = std::span(order).first(rank);
      const auto fits = [&](std::size_t offset) {
        return std::none_of(placed.begin(), placed.end(), [&](std::size_t other) {
          return share_a_phase(need, needs[other]) &&
                 overlap(offset, need.bytes, layout.offsets[other], needs[other].bytes);
        });
      };
      // The lowest place is the start, or right behind one that is in the way.
      std::size_t best = fits(0) ? 0 : std::numeric_limits<std::size_t>::max();
      for (std::size_t other : placed) {
        const std::size_t behind = round_up_to(layout.offsets[other] + needs[other].bytes, need.alignment);
        if (behind < best && fits(behind)) best = behind;
      }
      layout.offsets[order[rank]] = best;
      layout.bytes = std::max(layout.bytes, round_up_to(best + need.bytes, kBaseAlignment));
    }
    return layout;
  });
}

struct Workspace::State {
  struct Place {
    std::string name;
    std::size_t offset = 0;  // of the slice itself, behind its guard
    std::size_t bytes = 0;
    std::uint64_t generation = 0;  // odd while the slice is taken
    bool taken() const { return generation % 2 == 1; }
  };

  DeviceMemory memory;
  std::vector<Place> places;
  bool checks = false;
  bool guards = false;

  std::byte* begin(const Place& place) const { return memory.data() + place.offset; }
  void paint(const Place& place) const {
    std::memset(begin(place) - kGuardBytes, static_cast<int>(kGuardByte), kGuardBytes);
    std::memset(begin(place) + place.bytes, static_cast<int>(kGuardByte), kGuardBytes);
  }
  Status look(const Place& place) const {
    const auto damaged = [](const std::byte* from) {
      return std::find_if(from, from + kGuardBytes, [](std::byte byte) { return byte != kGuardByte; }) - from;
    };
    const auto whole = static_cast<std::ptrdiff_t>(kGuardBytes);
    if (const std::ptrdiff_t at = damaged(begin(place) + place.bytes); at != whole)
      return backend::invalid(place.name, "nothing written behind its " + backend::text(place.bytes) + " bytes",
                              "a write " + backend::text(at) + " bytes behind the end");
    if (const std::ptrdiff_t at = damaged(begin(place) - kGuardBytes); at != whole)
      return backend::invalid(place.name, "nothing written before it",
                              "a write " + backend::text(whole - at) + " bytes before the start");
    return {};
  }
  // The one among the taken slices that lies in the memory of this one.
  const Place* in_the_way(const Place& wanted) const {
    const std::size_t edge = guards ? kGuardBytes : 0;
    for (const Place& place : places)
      if (place.taken() && (&place == &wanted || overlap(place.offset - edge, place.bytes + 2 * edge,
                                                         wanted.offset - edge, wanted.bytes + 2 * edge)))
        return &place;
    return nullptr;
  }
};

Workspace::Workspace(std::unique_ptr<State> state) : state_(std::move(state)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

Result<Workspace> Workspace::create(const Backend& backend, std::span<const WorkspaceNeed> needs,
                                    const WorkspaceOptions& options) {
  if (!needs.empty() && needs.data() == nullptr) return backend::missing("needs", "a pointer", "null");
  if (options.checks > WorkspaceChecks::off)
    return backend::invalid("checks", "a WorkspaceChecks", backend::text(static_cast<std::int32_t>(options.checks)));
  try {
    auto state = std::make_unique<State>();
    state->checks =
        options.checks == WorkspaceChecks::on || (options.checks == WorkspaceChecks::debug_builds && kDebugBuild);
    state->guards = state->checks && !backend.on_device();
    const std::size_t edge = state->guards ? kGuardBytes : 0;
    std::vector<WorkspaceNeed> padded(needs.begin(), needs.end());
    // Too large ones are left as they are, for the layout to refuse.
    for (WorkspaceNeed& need : padded)
      if (need.bytes <= kMaxNeedBytes - 2 * edge) need.bytes += 2 * edge;
    const auto layout = lay_out_workspace(padded);
    if (!layout.ok()) return layout.status();
    for (std::size_t i = 0; i < needs.size(); ++i)
      state->places.push_back(
          {.name = std::string(needs[i].name), .offset = layout->offsets[i] + edge, .bytes = needs[i].bytes});
    auto memory = DeviceMemory::allocate(backend, layout->bytes);
    if (!memory.ok()) return memory.status();
    state->memory = std::move(*memory);
    return Workspace(std::move(state));
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "needs", "memory to keep a list of them", "none");
  }
}

Result<WorkspaceSlice> Workspace::take(std::int32_t need) {
  const auto count = static_cast<std::int32_t>(state_ ? state_->places.size() : 0);
  if (need < 0 || need >= count)
    return backend::invalid("need", "0 .. " + backend::text(count - 1), backend::text(need));
  State::Place& place = state_->places[static_cast<std::size_t>(need)];
  if (state_->checks) {
    if (const State::Place* other = state_->in_the_way(place))
      return backend::invalid(place.name, "memory that nobody uses",
                              other == &place ? "a slice that is taken already"
                                              : "memory that \"" + other->name + "\" lies in, which is taken");
    ++place.generation;
    if (state_->guards) state_->paint(place);
  }
  return WorkspaceSlice{.bytes = {state_->begin(place), place.bytes}, .need = need, .generation = place.generation};
}

Status Workspace::give_back(const WorkspaceSlice& slice) {
  const auto count = static_cast<std::int32_t>(state_ ? state_->places.size() : 0);
  if (slice.need < 0 || slice.need >= count)
    return backend::invalid("slice", "one that take() returned", "need " + backend::text(slice.need));
  if (!state_->checks) return {};
  State::Place& place = state_->places[static_cast<std::size_t>(slice.need)];
  if (!place.taken() || place.generation != slice.generation)
    return {Code::stale_metadata, place.name, "the slice that was taken last and not given back", "another one"};
  ++place.generation;
  return state_->guards ? state_->look(place) : Status();
}

Status Workspace::check() const {
  if (state_ == nullptr || !state_->guards) return {};
  for (const State::Place& place : state_->places)
    if (place.taken()) LATTE_RETURN_IF_ERROR(state_->look(place));
  return {};
}

std::size_t Workspace::bytes() const { return state_ ? state_->memory.size() : 0; }

}  // namespace latte
