#include "cli/batch_spec.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace latte::cli {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<BatchSpec> parse() {
    if (text_.size() > static_cast<std::size_t>(kMaxSpecChars))
      return Status(Code::out_of_limits, "spec", fmt::format("at most {} characters", kMaxSpecChars),
                    fmt::format("{}", text_.size()));
    BatchSpec spec{.text = std::string(text_), .groups = {}};
    std::int64_t requests = 0, query_tokens = 0;
    do {
      const std::size_t group_at = at_;
      RequestGroup group;
      if (Status status = parse_group(group); !status.ok()) return status;
      requests += group.count;
      query_tokens += static_cast<std::int64_t>(group.count) * group.query_tokens;
      if (requests > kMaxSpecRequests) return too_many(group_at, "requests", kMaxSpecRequests, requests);
      if (query_tokens > kMaxSpecQueryTokens)
        return too_many(group_at, "query tokens in all", kMaxSpecQueryTokens, query_tokens);
      spec.groups.push_back(group);
    } while (take('_'));
    if (at_ != text_.size()) return expected("'_' or the end");
    return spec;
  }

 private:
  Status parse_group(RequestGroup& group) {
    if (is_digit()) {
      const std::size_t at = at_;
      if (Status status = parse_number(kMaxSpecRequests, group.count); !status.ok()) return status;
      if (group.count == 0) return expected_at(at, "a count of at least 1", "0");
    }
    if (!take('q')) return expected(at_ == 0 || text_[at_ - 1] == '_' ? "a count or 'q'" : "'q'");
    const std::size_t query_at = at_;
    if (Status status = parse_length("a query length", kMaxSpecQueryTokens, group.query_tokens); !status.ok())
      return status;
    if (group.query_tokens == 0) return expected_at(query_at, "a query length of at least 1", "0");
    group.kv_tokens = group.query_tokens;
    if (!take('s')) return {};
    const std::size_t kv_at = at_;
    if (Status status = parse_length("a KV length", kMaxSpecKvTokens, group.kv_tokens); !status.ok()) return status;
    if (group.kv_tokens != 0 && group.kv_tokens < group.query_tokens)
      return expected_at(kv_at,
                         fmt::format("0 or a KV length of at least the query length {} (it counts the query tokens)",
                                     group.query_tokens),
                         fmt::format("{}", group.kv_tokens));
    return {};
  }

  Status parse_length(const char* what, std::int32_t limit, std::int32_t& value) {
    if (!is_digit()) return expected(what);
    return parse_number(limit, value);
  }

  // Digits and an optional k. The number sticks at limit + 1 while it grows, so no run of digits overflows.
  Status parse_number(std::int32_t limit, std::int32_t& value) {
    const std::size_t begin = at_;
    std::int64_t number = 0;
    while (is_digit()) {
      number = std::min<std::int64_t>(number * 10 + (text_[at_] - '0'), std::int64_t{limit} + 1);
      ++at_;
    }
    if (take('k')) number *= 1024;
    if (number > limit)
      return Status(Code::out_of_limits, "spec", fmt::format("at most {} at character {}", limit, begin + 1),
                    quoted(text_.substr(begin, std::min<std::size_t>(at_ - begin, 24))));
    value = static_cast<std::int32_t>(number);
    return {};
  }

  bool is_digit() const { return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; }
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  static std::string quoted(std::string_view text) {
    std::string result = "'";
    for (char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0x20 && byte < 0x7f)
        result += c;
      else
        result += fmt::format("\\x{:02x}", byte);
    }
    return result + "'";
  }

  static Status expected_at(std::size_t at, std::string what, std::string got) {
    return Status(Code::invalid_argument, "spec", fmt::format("{} at character {}", what, at + 1), std::move(got));
  }
  Status expected(std::string what) const {
    return expected_at(at_, std::move(what), at_ < text_.size() ? quoted(text_.substr(at_, 1)) : "the end");
  }
  static Status too_many(std::size_t at, const char* what, std::int64_t limit, std::int64_t got) {
    return Status(Code::out_of_limits, "spec",
                  fmt::format("at most {} {} up to the group at character {}", limit, what, at + 1),
                  fmt::format("{}", got));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

std::int32_t BatchSpec::requests() const {
  std::int32_t sum = 0;
  for (const RequestGroup& group : groups) sum += group.count;
  return sum;
}

std::int32_t BatchSpec::max_query_tokens() const {
  std::int32_t most = 0;
  for (const RequestGroup& group : groups) most = std::max(most, group.query_tokens);
  return most;
}

std::int32_t BatchSpec::total_query_tokens() const {
  std::int32_t sum = 0;
  for (const RequestGroup& group : groups) sum += group.count * group.query_tokens;
  return sum;
}

std::int32_t BatchSpec::max_kv_tokens() const {
  std::int32_t most = 0;
  for (const RequestGroup& group : groups) most = std::max(most, group.kv_tokens);
  return most;
}

std::int64_t BatchSpec::total_kv_tokens() const {
  std::int64_t sum = 0;
  for (const RequestGroup& group : groups) sum += static_cast<std::int64_t>(group.count) * group.kv_tokens;
  return sum;
}

Limits BatchSpec::limits() const {
  return {.max_requests = requests(),
          .max_query_tokens = max_query_tokens(),
          .max_total_query_tokens = total_query_tokens(),
          .max_kv_tokens = max_kv_tokens(),
          .max_total_kv_tokens = total_kv_tokens(),
          .workers = 0};
}

Result<BatchSpec> parse_batch_spec(std::string_view text) { return Parser(text).parse(); }

BatchLengths batch_lengths(const BatchSpec& spec) {
  BatchLengths lengths;
  const auto requests = static_cast<std::size_t>(spec.requests());
  lengths.seq_lens.reserve(requests);
  lengths.query_start.reserve(requests + 1);
  lengths.query_start.push_back(0);
  for (const RequestGroup& group : spec.groups) {
    for (std::int32_t i = 0; i < group.count; ++i) {
      lengths.seq_lens.push_back(group.kv_tokens);
      lengths.query_start.push_back(lengths.query_start.back() + group.query_tokens);
    }
  }
  return lengths;
}

}  // namespace latte::cli
