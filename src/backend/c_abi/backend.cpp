#include <algorithm>
#include <memory>
#include <vector>

#include "backend/c_abi/c_abi.hpp"

namespace latte::c_abi {
namespace {

// The support table, with its texts as C sees them.
struct CSupport {
  SupportTable table = support_table();
  std::vector<const char*> backends = texts(table.backends);
  std::vector<std::vector<const char*>> answers;

  CSupport() {
    for (const SupportRow& row : table.rows) answers.push_back(texts(row.answers));
  }
  static std::vector<const char*> texts(const std::vector<std::string>& strings) {
    std::vector<const char*> pointers(strings.size());
    std::transform(strings.begin(), strings.end(), pointers.begin(), [](const std::string& s) { return s.c_str(); });
    return pointers;
  }
};
const CSupport& c_support() {
  static const CSupport kSupport;
  return kSupport;
}

Status check_index(std::int32_t index, std::size_t count) {
  if (index >= 0 && static_cast<std::size_t>(index) < count) return {};
  return backend::invalid("index", "0 .. " + backend::text(static_cast<std::int64_t>(count) - 1), backend::text(index));
}

}  // namespace
}  // namespace latte::c_abi

using namespace latte;
using namespace latte::c_abi;

extern "C" {

latte_code latte_backend_open(const latte_backend_options* options, latte_backend** backend, latte_error* error) {
  return guarded(error, [&]() -> Status {
    if (backend == nullptr) return backend::missing("backend", "where to put the handle", "null");
    *backend = nullptr;
    latte_backend_options full = LATTE_BACKEND_OPTIONS_INIT;
    if (options != nullptr)
      LATTE_RETURN_IF_ERROR(read_struct(options, "options", offsetof(latte_backend_options, name), full));
    BackendOptions wanted{.threads = full.threads, .device = full.device, .serial_launches = full.serial_launches != 0};
    if (full.name != nullptr) wanted.name = full.name;
    if (full.kernel != nullptr) wanted.kernel = full.kernel;
    auto opened = Backend::open(wanted);
    if (!opened.ok()) return opened.status();
    *backend = std::make_unique<latte_backend>(latte_backend{*opened, opened->info()}).release();
    return {};
  });
}

latte_code latte_backend_close(latte_backend* backend, latte_error* error) { return destroy_handle(backend, error); }

latte_code latte_backend_info(const latte_backend* backend, latte_machine_info* info, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    LATTE_RETURN_IF_ERROR(check_struct(info, "info", offsetof(latte_machine_info, backend)));
    write_struct({.size = 0,
                  .threads = backend->info.threads,
                  .backend = backend->info.backend.c_str(),
                  .processor = backend->info.processor.c_str(),
                  .features = backend->info.features.c_str(),
                  .kernel_count = static_cast<std::int32_t>(backend->info.kernels.size()),
                  .on_device = backend->backend.on_device() ? 1 : 0,
                  .device = backend->info.device.c_str(),
                  .driver = backend->info.driver.c_str(),
                  .note = backend->info.note.c_str()},
                 info);
    return {};
  });
}

latte_code latte_backend_kernel(const latte_backend* backend, int32_t index, latte_kernel_info* info,
                                latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    LATTE_RETURN_IF_ERROR(check_struct(info, "info", offsetof(latte_kernel_info, name)));
    LATTE_RETURN_IF_ERROR(check_index(index, backend->info.kernels.size()));
    const KernelInfo& kernel = backend->info.kernels[static_cast<std::size_t>(index)];
    write_struct({.size = 0,
                  .usable = kernel.usable ? 1 : 0,
                  .name = kernel.name.c_str(),
                  .reason = kernel.reason.c_str(),
                  .serves = kernel.serves.c_str()},
                 info);
    return {};
  });
}

latte_code latte_backend_synchronize(const latte_backend* backend, void* stream, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    return backend->backend.synchronize(stream);
  });
}

latte_code latte_backend_measure_ceilings(const latte_backend* backend, const char* kernel, latte_ceilings* ceilings,
                                          latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    if (kernel == nullptr) return backend::missing("kernel", "a kernel's name", "null");
    LATTE_RETURN_IF_ERROR(check_struct(ceilings, "ceilings", offsetof(latte_ceilings, tflops)));
    const auto measured = backend->backend.measure_ceilings(kernel);
    if (!measured.ok()) return measured.status();
    write_struct({.size = 0,
                  .reserved = 0,
                  .read_gbps = measured->read_gbps,
                  .tflops = measured->tflops,
                  .clock_mhz = measured->clock_mhz},
                 ceilings);
    return {};
  });
}

latte_code latte_backend_supports(const latte_backend* backend, const latte_problem* problem, latte_support* support,
                                  latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(need_backend(backend));
    LATTE_RETURN_IF_ERROR(check_struct(support, "support", offsetof(latte_support, kernel)));
    DecodeProblem wanted;
    LATTE_RETURN_IF_ERROR(read_problem(problem, wanted));
    write_support(backend->backend.supports(wanted), support);
    return {};
  });
}

latte_code latte_support_table_rows(int32_t* count, latte_error* error) {
  return guarded(error, [&]() -> Status {
    if (count == nullptr) return backend::missing("count", "where to put the count", "null");
    *count = static_cast<std::int32_t>(c_support().table.rows.size());
    return {};
  });
}

latte_code latte_support_table_row(int32_t index, latte_support_row* row, latte_error* error) {
  return guarded(error, [&]() -> Status {
    LATTE_RETURN_IF_ERROR(check_struct(row, "row", offsetof(latte_support_row, feature)));
    const CSupport& support = c_support();
    LATTE_RETURN_IF_ERROR(check_index(index, support.table.rows.size()));
    const auto i = static_cast<std::size_t>(index);
    write_struct({.size = 0,
                  .backend_count = static_cast<std::int32_t>(support.backends.size()),
                  .feature = support.table.rows[i].feature.c_str(),
                  .backends = support.backends.data(),
                  .answers = support.answers[i].data()},
                 row);
    return {};
  });
}

}  // extern "C"
