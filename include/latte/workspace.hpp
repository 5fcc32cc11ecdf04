// Scratch memory for a whole engine step: sized once from what every user needs, allocated once, handed out in slices.
// A need says in which phases of a step it is live. Needs without a phase in common share memory; all others never
// overlap. Nothing is allocated after create().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "latte/backend.hpp"
#include "latte/status.hpp"

namespace latte {

inline constexpr std::uint64_t kEveryPhase = ~std::uint64_t{0};

struct WorkspaceNeed {
  std::string_view name{};  // for error messages
  std::size_t bytes = 0;
  std::size_t alignment = 256;         // a power of two up to 256
  std::uint64_t phases = kEveryPhase;  // a bit for each phase of a step in which its content is needed
};

// Where each need lies in one buffer that is aligned to 256 bytes. A pure function of the needs.
struct WorkspaceLayout {
  std::vector<std::size_t> offsets;
  std::size_t bytes = 0;
};
Result<WorkspaceLayout> lay_out_workspace(std::span<const WorkspaceNeed> needs);

// A slice in somebody's hands.
struct WorkspaceSlice {
  std::span<std::byte> bytes{};
  std::int32_t need = -1;
  std::uint64_t generation = 0;
};

enum class WorkspaceChecks : std::uint8_t { debug_builds, on, off };  // debug_builds: of the library, not of the caller

struct WorkspaceOptions {
  // Watch who uses what: a slice that is taken twice or while another one lies in its memory, a slice given back twice,
  // and, on the host, guard words before and behind every slice. Off, take() is an addition and give_back() nothing.
  WorkspaceChecks checks = WorkspaceChecks::debug_builds;
};

// One thread at a time. The slices' addresses never change, so that graphs can hold them.
class Workspace {
 public:
  static Result<Workspace> create(const Backend& backend, std::span<const WorkspaceNeed> needs,
                                  const WorkspaceOptions& options = {});
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  // The slice of needs[need], uninitialised.
  Result<WorkspaceSlice> take(std::int32_t need);
  // Work on a slice that shares memory with this one has to come after this one's: on a device in the same stream, or
  // in one that waits for it.
  Status give_back(const WorkspaceSlice& slice);
  // Whether the guard words of every slice that is taken are whole.
  Status check() const;

  std::size_t bytes() const;  // that were allocated

 private:
  struct State;
  explicit Workspace(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace latte
