// Any bytes give tensors that lie within the file, or an error; the same for reading them as a captured call.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "cli/captured.hpp"
#include "cli/captured_prefill.hpp"
#include "cli/safetensors.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(std::span<const std::byte> file) {
  using namespace latte::cli;
  const auto parsed = Safetensors::parse(file);
  if (!parsed) {
    require(!parsed.status().message().empty());
    return;
  }
  std::size_t bytes = 0;
  unsigned sum = 0;
  for (const auto& [name, tensor] : parsed->tensors()) {
    bytes += tensor.bytes.size();
    for (const std::byte value : tensor.bytes) sum += static_cast<unsigned>(value);  // the sanitizer sees every read
    require(reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % file_dtype_bytes(tensor.dtype) == 0);
  }
  require(bytes <= file.size() && sum <= 255 * bytes);
  if (const auto prompt = read_captured_prefill(*parsed); prompt) {
    require(prompt->query_start.size() == prompt->kv_start.size());
    require(prompt->limits().max_requests >= 1);
  } else {
    require(!prompt.status().message().empty());
  }
  const auto call = read_captured(*parsed);
  if (!call) {
    require(!call.status().message().empty());
    return;
  }
  require(call->query_start.size() == call->seq_lens.size() + 1);
  require(call->limits().max_requests >= 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span file(reinterpret_cast<const std::byte*>(data), size);
  check(file);
  // Most inputs fail at the length field; with a right one the header is reached.
  if (size < 2) return 0;
  const std::size_t header = data[0] * (size - 1) / 255;
  std::vector<std::byte> fixed(8);
  for (int i = 0; i < 8; ++i) fixed[static_cast<std::size_t>(i)] = static_cast<std::byte>(header >> (8 * i));
  fixed.insert(fixed.end(), file.begin() + 1, file.end());
  check(fixed);
  return 0;
}
