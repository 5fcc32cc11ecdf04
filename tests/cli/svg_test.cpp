#include "cli/svg.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/batch_spec.hpp"

namespace latte::cli {
namespace {

// Tags that open and close in order, attributes in quotes, no stray '<' or '&'. Empty when well formed.
std::string xml_problem(const std::string& text) {
  std::vector<std::string> open;
  std::size_t at = text.find("?>");
  at = at == std::string::npos ? 0 : at + 2;
  while (at < text.size()) {
    if (text[at] == '&') {
      const std::size_t end = text.find(';', at);
      if (end == std::string::npos || end - at > 6) return "a stray & at " + std::to_string(at);
    }
    if (text[at] != '<') {
      ++at;
      continue;
    }
    std::size_t end = at + 1;
    for (bool quoted = false; end < text.size() && (quoted || text[end] != '>'); ++end) {
      if (text[end] == '"') quoted = !quoted;
      if (text[end] == '<') return "a stray < at " + std::to_string(end);
    }
    if (end >= text.size()) return "a tag that does not end";
    const std::string tag = text.substr(at + 1, end - at - 1);
    const std::string name =
        tag.substr(tag.front() == '/' ? 1 : 0, tag.find_first_of(" \n/", 1) - (tag.front() == '/' ? 1 : 0));
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "</" + tag.substr(1) + "> closes nothing";
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct Drawn {
  PlanConfig config;
  BatchLengths lengths;
  OwnedPlan plan;
  std::string svg;
};

Drawn draw(const std::string& text, std::int32_t workers, Policy policy, const std::string& title, Op op = Op::decode) {
  const BatchSpec spec = parse_batch_spec(text).value();
  PlanConfig config{.heads = 16, .row_tile = 64, .kv_block = 64, .workers = workers, .policy = policy};
  config.cost = {
      .piece_ticks = 2000, .split_ticks = 3000, .block_ticks = 1000, .granule_ticks = 300, .row_granule = 16};
  config.op = op;
  config.limits = spec.limits();
  config.limits.workers = workers;
  Drawn drawn{config, batch_lengths(spec), OwnedPlan::make(config, batch_lengths(spec).view()).value(), {}};
  drawn.svg =
      plan_svg({.config = drawn.config, .plan = drawn.plan.plan(), .lengths = drawn.lengths.view(), .title = title});
  return drawn;
}

TEST(PlanSvg, IsWellFormedForEveryKindOfBatch) {
  std::string many;
  for (int i = 0; i < 256; ++i)
    many += (i ? "_q" : "q") + std::to_string(1 + i % 4) + "s" + std::to_string(10 + 37 * i);
  const Policy policies[] = {Policy::balanced(), Policy::uniform(4), Policy::batch_invariant(512)};
  for (const std::string& spec : {std::string("q1s1"), std::string("3q1s0"), std::string("1q1s64k_63q1s2k"), many})
    for (const std::int32_t workers : {1, 2, 16, 132, 500})
      for (const Policy& policy : policies)
        EXPECT_EQ(xml_problem(draw(spec, workers, policy, spec).svg), "") << spec << " on " << workers << " workers";
}

TEST(PlanSvg, HasABarForEveryRecordAndAMarkForEveryMerge) {
  const Drawn drawn = draw("1q1s64k_63q1s2k", 132, Policy::balanced(), "skewed");
  const Plan& plan = drawn.plan.plan();
  ASSERT_GT(plan.work_meta_data[kMetaSplitTiles], 0);
  EXPECT_EQ(count(drawn.svg, "<title>request ") - count(drawn.svg, "partials joined by"), plan.work_info_set.size());
  EXPECT_EQ(count(drawn.svg, "partials joined by"), static_cast<std::size_t>(plan.work_meta_data[kMetaSplitTiles]));
  EXPECT_EQ(count(drawn.svg, "a piece of a split tile&#10;"), plan.reduce_partial_map.size());
  EXPECT_NE(drawn.svg.find("132 workers"), std::string::npos);
  EXPECT_NE(drawn.svg.find("request 0: 1 query token, 65536 KV tokens"), std::string::npos);
  EXPECT_NE(drawn.svg.find("requests 1 to 63: 1 query token, 2048 KV tokens each"), std::string::npos);
}

TEST(PlanSvg, OfPrefillNamesHeadsAndQueryTokens) {
  const Drawn drawn = draw("1q512s4k_2q100", 50, Policy::balanced(), "prompts", Op::prefill);
  const Plan& plan = drawn.plan.plan();
  ASSERT_GT(plan.work_meta_data[kMetaSplitTiles], 0);
  EXPECT_EQ(xml_problem(drawn.svg), "");
  EXPECT_EQ(count(drawn.svg, ": head "), plan.work_info_set.size());
  EXPECT_EQ(count(drawn.svg, "request 2: head 15, query tokens 64 to 100, KV 0 to 100 (100 tokens)"), 1u);
  EXPECT_NE(drawn.svg.find("paler: later heads"), std::string::npos);
}

TEST(PlanSvg, ATitleCannotBreakTheDocument) {
  const Drawn drawn = draw("q1s100", 2, Policy::balanced(), "</text><script> & \"quotes\"");
  EXPECT_EQ(xml_problem(drawn.svg), "");
  EXPECT_EQ(drawn.svg.find("<script>"), std::string::npos);
}

TEST(PlanSvg, TheWellFormednessCheckCanFail) {
  EXPECT_NE(xml_problem("<a><b></a></b>"), "");
  EXPECT_NE(xml_problem("<a>"), "");
  EXPECT_NE(xml_problem("<a>1 & 2</a>"), "");
  EXPECT_NE(xml_problem("<a title=\"<\"></a>"), "");
  EXPECT_EQ(xml_problem("<a x=\"1\"><b/>&amp;</a>"), "");
}

}  // namespace
}  // namespace latte::cli
