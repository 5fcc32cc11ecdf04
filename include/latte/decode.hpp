// Decode: plan a step once with a MetadataBuilder, then run every layer with decode().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "latte/backend.hpp"
#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"
#include "latte/workspace.hpp"

namespace latte {

struct BuilderOptions {
  Policy policy{};
  std::int32_t slots = 1;  // steps in flight at once; each has its own plan and workspace
  // false: the caller passes DecodeArgs::workspace and the builder allocates none.
  bool own_workspace = true;
  // Devices only: every decode, and every prefill with context, is preceded by a kernel that looks at the lengths and
  // at every page id that will be followed. What it finds is told by the next call on the builder, or by
  // Backend::synchronize. On cpu they always look.
  bool validate = false;
  // Memory for the plans and lengths of all slots: sized and aligned as needs() says, uninitialised, used by nobody
  // else, alive as long as the builder. On a device it is the device's; the buffers on the host from which steps are
  // uploaded are always the builder's own. Empty: the builder allocates it.
  std::span<std::byte> plan_memory{};
};

// The memory of a builder, known before there is one: what to ask a Workspace for. Phases are the caller's to narrow.
struct BuilderNeeds {
  WorkspaceNeed plan{};       // BuilderOptions::plan_memory. A slot's plan is in use until its step's last call is done
  WorkspaceNeed workspace{};  // of one slot, with own_workspace = false
};

// The lengths of one step in a device's memory, for build_on_device(). The host never reads them. They stay in place
// until the step's last decode is done; a captured graph reads them anew in every replay.
struct DeviceLengths {
  std::int32_t requests = 0;
  const std::int32_t* seq_lens = nullptr;     // [requests]
  const std::int32_t* query_start = nullptr;  // [requests + 1]
  const std::int32_t* visible = nullptr;      // optional, [query_tokens]
  std::int32_t query_tokens = 0;              // rows of q and out; query_start[requests] may be less, never more
};

namespace backend {
struct Slot;
class Builder;
}  // namespace backend

// One planned step. Cheap to copy; valid until its slot is built again and while the builder lives. For a step that
// was planned on the device, plan() and the lengths are empty: MetadataBuilder::copy_plan fetches the plan.
class DecodeMetadata {
 public:
  const DecodeProblem& problem() const;
  const Plan& plan() const;
  const PlanConfig& plan_config() const;
  std::span<const std::int32_t> seq_lens() const;
  std::span<const std::int32_t> query_start() const;
  std::span<const std::int32_t> visible() const;
  const char* kernel() const;
  bool on_device() const;  // planned there, by build_on_device()
  std::uint64_t generation() const { return generation_; }

 private:
  friend class backend::Builder;
  friend class MetadataBuilder;
  friend Status decode(const DecodeMetadata& metadata, const struct DecodeArgs& args);
  backend::Slot* slot_ = nullptr;
  std::uint64_t generation_ = 0;
};

// Owns the buffers of every slot, but for those the options leave to the caller; sizes follow from problem and limits,
// and addresses never change.
class MetadataBuilder {
 public:
  // What create() with the same arguments needs, whatever options.plan_memory says.
  static Result<BuilderNeeds> needs(const Backend& backend, const DecodeProblem& problem, const Limits& limits,
                                    const BuilderOptions& options = {});
  static Result<MetadataBuilder> create(const Backend& backend, const DecodeProblem& problem, const Limits& limits,
                                        const BuilderOptions& options = {});
  MetadataBuilder(MetadataBuilder&&) noexcept;
  MetadataBuilder& operator=(MetadataBuilder&&) noexcept;
  ~MetadataBuilder();

  // Plans a step into a slot, on the host. Allocates nothing unless it fails. On a device the plan and the lengths are
  // then uploaded in the stream, from one of two buffers that take turns: a third build waits if the first one's upload
  // is still on its way, which a caller with a slot for each step in flight never sees. Decode in the same stream, or
  // behind it. Cannot be captured in a graph.
  Result<DecodeMetadata> build(std::int32_t slot, const StepLengths& lengths, Stream stream = nullptr);
  // Plans a step into a slot, by a kernel in the stream: nothing is copied to the host, nothing waits, every address is
  // the same each time, so that a graph can hold it. The plan has the same bits as build() would give. Lengths are
  // trusted, but clamped to the limits.
  Result<DecodeMetadata> build_on_device(std::int32_t slot, const DeviceLengths& lengths, Stream stream);
  // A step's plan as it lies on the device, for tests and curiosity. Waits for the stream.
  Result<OwnedPlan> copy_plan(const DecodeMetadata& metadata, Stream stream = nullptr) const;

  // On a device a workspace the caller brings has to pass here once before its first use with this builder, and again
  // after anyone else wrote to it; launches leave it ready for the next one. One decode at a time may use it. On cpu
  // this only looks at its size and address.
  Status init_workspace(std::span<std::byte> workspace, Stream stream = nullptr) const;

  std::size_t workspace_bytes() const;  // of one slot, 64-byte aligned
  const PlanConfig& plan_config() const;
  const PlanSizes& plan_sizes() const;
  const char* kernel() const;
  const std::string& reason() const;  // for the kernel

 private:
  explicit MetadataBuilder(std::unique_ptr<backend::Builder> impl);
  std::unique_ptr<backend::Builder> impl_;
};

// The pages of each request: a block table, or the CSR pair; exactly one of the two.
struct PageTable {
  const std::int32_t* block_table = nullptr;  // [B, max_pages]
  std::int64_t block_table_stride = 0;        // elements between rows
  std::int64_t max_pages = 0;
  std::span<const std::int32_t> page_indptr{};  // [B + 1]
  std::span<const std::int32_t> page_indices{};
};

struct DecodeArgs {
  // q [T, H, latent + rope], or the pair q_nope [T, H, latent] and q_pe [T, H, rope]. Last dimension dense.
  ConstTensorView q{};
  ConstTensorView q_nope{};
  ConstTensorView q_pe{};
  ConstTensorView kv_cache{};  // [pages, page_size, W], last dimension dense
  PageTable pages{};
  TensorView out{};  // [T, H, latent], last dimension dense
  TensorView lse{};  // optional, fp32 [T, H], natural log
  float scale = 0;
  Fp8Scale q_scale{};                // fp8 q only; one number
  Fp8Scale kv_scale{};               // fp8_e4m3 cache only; one number
  std::span<std::byte> workspace{};  // empty = the slot's own
  Stream stream = nullptr;           // where to queue the work on a device
  // cuda: plan, lengths, page table and older cache slots are read while the kernel queued before still runs. That
  // kernel may then write only q and the slots of this step's own tokens (a request's last ones, as many as it has
  // query tokens), for which decode waits. Behind build_on_device() the first decode in the same stream waits for the
  // plan all the same.
  bool overlap_previous = false;
};

// Writes every element of out and lse for rows [0, query_start[B]) and nothing else. On an error nothing is written.
// out and lse must overlap neither each other nor anything the call reads: q, kv_cache, pages, workspace. This is not
// checked, and what comes out otherwise is undefined.
// One thread at a time per slot; different slots may run at once.
// On a device every address, the page table's included, is a device address, bases and outer strides are multiples of
// 16 bytes, and the call returns when the work is queued.
// It can be captured in a graph. A replay runs the step that was built into the slot last, on the captured tensors,
// provided that
//   - all of these steps are built the same way: by build(), or by build_on_device() from the same arrays and with no
//     more query tokens;
//   - `visible` is given to all of them or to none;
//   - the captured step had query tokens;
//   - the page table has a row for each request of the largest.
// On cuda it may be a programmatic dependent launch. It waits for the kernel queued before; if that is such a launch
// too, it must itself execute griddepcontrol.wait before it ends, as is usual. BackendOptions::serial_launches does
// without this.
Status decode(const DecodeMetadata& metadata, const DecodeArgs& args);

}  // namespace latte
