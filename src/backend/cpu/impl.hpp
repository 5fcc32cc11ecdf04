// The CPU backend behind Impl, in two files: impl.cpp and, for prefill and what serves it, prefill.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "backend/impl.hpp"
#include "cpu/cpu.hpp"

namespace latte::backend {

// The paged cache as the CPU room wants it.
cpu::CacheView cache_view(const ConstTensorView& cache, KvFormat format, const PageTable& pages);

class CpuImpl final : public Impl {
 public:
  CpuImpl(std::int32_t threads, std::string kernel) : workers_(threads), kernel_(std::move(kernel)) {}

  MachineInfo info() const override;
  std::int32_t workers() const override { return workers_.count(); }
  Place place() const override { return Place::host; }

  Result<KernelChoice> choose(const DecodeProblem& problem, const Limits& limits, const Policy& policy) const override;
  std::size_t workspace_bytes(const DecodeProblem& problem, const PlanConfig& config,
                              const PlanSizes& sizes) const override;
  Result<std::unique_ptr<DecodeStep>> make_step(const Builder& builder, const BuilderOptions& options,
                                                std::int32_t* words) override;
  Status init_workspace(const Builder& /*builder*/, std::span<std::byte> /*workspace*/, Stream /*stream*/) override {
    return {};
  }

  Result<PrefillChoice> choose(const PrefillProblem& problem, const Limits& limits,
                               const Policy& policy) const override;
  std::size_t prefill_workspace_bytes(const PrefillSetup& setup) const override;
  Result<std::unique_ptr<PrefillStep>> make_prefill_step(const PrefillSetup& setup, std::int32_t* words,
                                                         const PrefillContext* validated) override;
  Status init_prefill_workspace(const PrefillSetup& /*setup*/, std::byte* /*workspace*/, Stream /*stream*/) override {
    return {};
  }
  Status gather_kv(const GatherKvArgs& args) override;

  Status merge(const MergeArgs& args) override;
  Status write_kv(const WriteKvArgs& args) override;

  Result<Ceilings> measure_ceilings(std::string_view kernel) override;
  Status synchronize(Stream /*stream*/) override { return {}; }

 private:
  cpu::Workers workers_;
  const std::string kernel_;  // "auto" or a name
};

}  // namespace latte::backend
