// Decode: plan a step once with a MetadataBuilder, then run every layer with decode().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "latte/backend.hpp"
#include "latte/plan.hpp"
#include "latte/problem.hpp"
#include "latte/status.hpp"
#include "latte/tensor.hpp"

namespace latte {

struct BuilderOptions {
  Policy policy{};
  std::int32_t slots = 1;  // steps in flight at once; each has its own plan and workspace
  // false: the caller passes DecodeArgs::workspace and the builder allocates none.
  bool own_workspace = true;
};

namespace backend {
struct Slot;
class Builder;
}  // namespace backend

// One planned step. Cheap to copy; valid until its slot is built again and while the builder lives.
class DecodeMetadata {
 public:
  const DecodeProblem& problem() const;
  const Plan& plan() const;
  const PlanConfig& plan_config() const;
  std::span<const std::int32_t> seq_lens() const;
  std::span<const std::int32_t> query_start() const;
  std::span<const std::int32_t> visible() const;
  const char* kernel() const;
  std::uint64_t generation() const { return generation_; }

 private:
  friend class backend::Builder;
  friend class MetadataBuilder;
  friend Status decode(const DecodeMetadata& metadata, const struct DecodeArgs& args);
  backend::Slot* slot_ = nullptr;
  std::uint64_t generation_ = 0;
};

// Owns the buffers of every slot; their addresses and sizes follow from problem and limits and never change.
class MetadataBuilder {
 public:
  static Result<MetadataBuilder> create(const Backend& backend, const DecodeProblem& problem, const Limits& limits,
                                        const BuilderOptions& options = {});
  MetadataBuilder(MetadataBuilder&&) noexcept;
  MetadataBuilder& operator=(MetadataBuilder&&) noexcept;
  ~MetadataBuilder();

  // Plans a step into a slot. Allocates nothing unless it fails.
  Result<DecodeMetadata> build(std::int32_t slot, const StepLengths& lengths);

  std::size_t workspace_bytes() const;  // of one slot, 64-byte aligned
  const PlanConfig& plan_config() const;
  const PlanSizes& plan_sizes() const;
  const char* kernel() const;

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
  float q_scale = 1;                    // fp8 q only
  float kv_scale = 1;                   // fp8_e4m3 cache only
  const float* q_scale_ptr = nullptr;   // read at run time instead of q_scale
  const float* kv_scale_ptr = nullptr;  // read at run time instead of kv_scale
  std::span<std::byte> workspace{};     // empty = the slot's own
};

// Writes every element of out and lse for rows [0, query_start[B]) and nothing else. On an error nothing is written.
// One thread at a time per slot; different slots may run at once.
Status decode(const DecodeMetadata& metadata, const DecodeArgs& args);

}  // namespace latte
