// Prefill: attention of new tokens over expanded keys and values, one K and V a head. Plan a step once with a
// PrefillBuilder, then run every layer with prefill(). Prompts whose older tokens lie in the paged cache give their
// lengths as `context_lens`: the same call then also gathers those tokens in chunks, has the caller expand each chunk
// to keys and values, and joins everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "latte/backend.hpp"
#include "latte/decode.hpp"
#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte {

// A chunk of the context on its way: the caller fills k and v from the latent rows, in the stream. k and v have the
// problem's dtype: where that is fp8, what is filled in counts times the call's k_scale and v_scale, like k and v
// themselves. Latent rows are f16 or f32 where the cache is, else bf16, with the cache's scales multiplied out.
struct ContextChunk {
  std::int32_t index = 0;                    // counts up from 0
  std::int32_t tokens = 0;                   // rows of the tensors below
  std::span<const std::int32_t> kv_start{};  // [B + 1], on the host: request b owns rows [kv_start[b], kv_start[b + 1])
  ConstTensorView latent{};                  // [tokens, latent + rope], in the cache's order
  TensorView k{};                            // [tokens, heads, qk_width]
  TensorView v{};                            // [tokens, heads, v_width]
  Stream stream = nullptr;
};
// What it returns other than ok ends the call. It must not use the slot's builder or metadata.
using ExpandChunk = Status (*)(void* user, const ContextChunk& chunk);

struct PrefillArgs {
  ConstTensorView q{};  // [Tq, H, qk_width]; last dimensions dense, other strides free
  ConstTensorView k{};  // [Tk, H, qk_width]
  ConstTensorView v{};  // [Tk, H, v_width]
  TensorView out{};     // [Tq, H, v_width]
  TensorView lse{};     // optional, fp32 [Tq, H], natural log
  float scale = 0;
  Fp8Scale q_scale{}, k_scale{}, v_scale{};  // of fp8 tensors, and of tensors that are quantised on entry
  std::span<std::byte> workspace{};          // empty = the slot's own
  Stream stream = nullptr;                   // where to queue the work on a device

  // Only with PrefillProblem::context.
  ConstTensorView kv_cache{};  // [pages, page_size, W]
  PageTable pages{};           // of the context tokens
  Fp8Scale kv_scale{};         // fp8_e4m3 cache only; one number
  ExpandChunk expand = nullptr;
  void* user = nullptr;
};

namespace backend {
struct PrefillSlot;
class PrefillBuilderImpl;
}  // namespace backend

// One planned step. Cheap to copy; valid until its slot is built again and while the builder lives.
class PrefillMetadata {
 public:
  const Plan& plan() const;  // of the new tokens
  std::span<const std::int32_t> query_start() const;
  std::span<const std::int32_t> kv_start() const;
  std::int32_t chunks() const;                       // of the context; 0 = there is none
  const Plan& chunk_plan(std::int32_t index) const;  // unmasked
  const char* kernel() const;
  PrefillMath math() const;  // what runs: half or fp8, never automatic
  std::uint64_t generation() const { return generation_; }

 private:
  friend class backend::PrefillBuilderImpl;
  friend Status prefill(const PrefillMetadata& metadata, const PrefillArgs& args);
  backend::PrefillSlot* slot_ = nullptr;
  std::uint64_t generation_ = 0;
};

// Owns the buffers of every slot, as MetadataBuilder does.
class PrefillBuilder {
 public:
  // What create() with the same arguments needs, whatever options.plan_memory says.
  static Result<BuilderNeeds> needs(const Backend& backend, const PrefillProblem& problem, const Limits& limits,
                                    const BuilderOptions& options = {});
  static Result<PrefillBuilder> create(const Backend& backend, const PrefillProblem& problem, const Limits& limits,
                                       const BuilderOptions& options = {});
  PrefillBuilder(PrefillBuilder&&) noexcept;
  PrefillBuilder& operator=(PrefillBuilder&&) noexcept;
  ~PrefillBuilder();

  // Plans a step into a slot, on the host; on a device plan and lengths are then uploaded in the stream. Allocates
  // nothing unless it fails, and waits for nothing that a caller with a slot for each step in flight would see.
  Result<PrefillMetadata> build(std::int32_t slot, const PrefillLengths& lengths, Stream stream = nullptr);

  // As MetadataBuilder::init_workspace.
  Status init_workspace(std::span<std::byte> workspace, Stream stream = nullptr) const;

  std::size_t workspace_bytes() const;  // of one slot, 256-byte aligned
  const PlanConfig& plan_config() const;
  const PlanSizes& plan_sizes() const;
  const char* kernel() const;
  PrefillMath math() const;
  const std::string& reason() const;  // for kernel and math
  std::int32_t chunk_tokens() const;  // most context tokens of a chunk, over all requests; 0 = no context

 private:
  explicit PrefillBuilder(std::unique_ptr<backend::PrefillBuilderImpl> impl);
  std::unique_ptr<backend::PrefillBuilderImpl> impl_;
};

// Writes every element of out and lse for rows [0, query_start[B]) and nothing else. On an error out and lse are not
// touched; if it is `expand` that fails, the workspace was written. One thread at a time per slot; different slots may
// run at once.
// out and lse must overlap neither each other nor anything the call reads: q, k, v, kv_cache, pages, workspace. This is
// not checked, and what comes out otherwise is undefined.
// On a device every address is a device address, bases and outer strides are multiples of 16 bytes, and the call
// returns when the work is queued. It can be captured in a graph. Without context, a replay runs the step that was
// built into the slot last, if that one has no context either and the captured one had query tokens and rows of k and
// v; rows of q, out and lse behind the captured tensors are dropped, while k and v must have had rows for all tokens of
// every later step (missing ones count as keys and values of zeros). With context, a replay repeats the captured step,
// chunk by chunk, for which `expand` may only queue work in the stream, and nothing else may be built into the slot. k
// and v may be left out when the step brings no new keys. lse is always available, also with context.
Status prefill(const PrefillMetadata& metadata, const PrefillArgs& args);

}  // namespace latte
