// Any text gives a batch within the limits or an error, and a batch's own numbers add up.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/batch_spec.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace latte::cli;
  const auto require = [](bool condition) {
    if (!condition) std::abort();
  };
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto spec = parse_batch_spec(text);
  if (!spec) {
    require(!spec.status().message().empty());
    return 0;
  }
  require(spec->text == text);
  require(spec->requests() >= 1 && spec->requests() <= kMaxSpecRequests);
  require(spec->total_query_tokens() >= spec->requests() && spec->total_query_tokens() <= kMaxSpecQueryTokens);
  require(spec->max_kv_tokens() <= kMaxSpecKvTokens);
  const BatchLengths lengths = batch_lengths(*spec);
  require(lengths.seq_lens.size() == static_cast<std::size_t>(spec->requests()));
  require(lengths.query_start.back() == spec->total_query_tokens());
  std::int64_t kv_tokens = 0;
  for (const std::int32_t tokens : lengths.seq_lens) kv_tokens += tokens;
  require(kv_tokens == spec->total_kv_tokens());
  return 0;
}
