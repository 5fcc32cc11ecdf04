// Prefill on a device.
#include "backend/cuda_impl.hpp"
#include "backend/errors.hpp"

namespace latte::backend {

Result<PrefillChoice> CudaImpl::choose(const PrefillProblem&, const Limits&, const Policy&) const {
  return unsupported("op", "decode", "prefill");
}
std::size_t CudaImpl::prefill_workspace_bytes(const PrefillSetup&) const { return 0; }
Result<std::unique_ptr<PrefillStep>> CudaImpl::make_prefill_step(const PrefillSetup&) {
  return unsupported("op", "decode", "prefill");
}
Status CudaImpl::init_prefill_workspace(const PrefillSetup&, std::byte*, Stream) { return {}; }
Status CudaImpl::gather_kv(const GatherKvArgs&) { return unsupported("op", "decode", "gather_kv"); }
Result<PrefillChoice> choose_for_cuda(const PrefillProblem&, const Limits&, const Policy&, std::int32_t) {
  return unsupported("op", "decode", "prefill");
}

}  // namespace latte::backend
