#include "cli/svg.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include <fmt/format.h>

namespace latte::cli {
namespace {

constexpr double kPlotWidth = 1120, kLeft = 58, kRight = 34, kTop = 92;
constexpr double kPlotHeight = 920;  // rows shrink towards it as workers grow
constexpr double kMaxRow = 30;
constexpr std::size_t kLegendEntries = 24;
constexpr std::size_t kTitleChars = 100;
constexpr std::size_t kMaxJoinLines = 1500;  // beyond it they hide the picture

// One record placed on the time axis.
struct Bar {
  std::int32_t worker = 0;
  std::int32_t record = 0;
  std::int64_t begin_ticks = 0, end_ticks = 0;
};

// Requests of equal lengths that follow each other: one entry of the legend, one arc of the colour wheel.
struct Family {
  std::int32_t first = 0, count = 0;
  std::int32_t query_tokens = 0, kv_tokens = 0;
};

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '"')
      result += "&quot;";
    else
      result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result;
}

std::vector<Bar> place(const PlanConfig& config, const Plan& plan) {
  std::vector<Bar> bars;
  for (std::int32_t w = 0; w < plan.workers(); ++w) {
    std::int64_t clock = 0;
    const auto at = static_cast<std::size_t>(w);
    for (std::int32_t r = plan.work_indptr[at]; r < plan.work_indptr[at + 1]; ++r) {
      const std::int64_t ticks = record_ticks(config, plan, plan.work_info_set[static_cast<std::size_t>(r)]);
      bars.push_back({.worker = w, .record = r, .begin_ticks = clock, .end_ticks = clock + ticks});
      clock += ticks;
    }
  }
  return bars;
}

std::vector<Family> families_of(const StepLengths& lengths) {
  std::vector<Family> result;
  for (std::size_t b = 0; b < lengths.seq_lens.size(); ++b) {
    const std::int32_t query = lengths.query_start[b + 1] - lengths.query_start[b], kv = lengths.seq_lens[b];
    if (!result.empty() && result.back().query_tokens == query && result.back().kv_tokens == kv)
      ++result.back().count;
    else
      result.push_back({.first = static_cast<std::int32_t>(b), .count = 1, .query_tokens = query, .kv_tokens = kv});
  }
  return result;
}

// hsl() is CSS that not every renderer of SVG knows: written out as #rrggbb.
std::string hex_colour(double hue, double saturation, double lightness) {
  const double reach = saturation * std::min(lightness, 1 - lightness);
  const auto channel = [&](double n) {
    const double k = std::fmod(n + hue / 30, 12);
    return static_cast<int>(std::lround(255 * (lightness - reach * std::max(-1.0, std::min({k - 3, 9 - k, 1.0})))));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

// Few families share out the wheel (one of many requests gets more, by the square root), and inside a family the hue
// walks its arc: neighbours differ and the family is still seen as one. Many families: every request on its own.
std::vector<std::string> request_colours(const std::vector<Family>& families) {
  constexpr std::size_t kFew = 8;
  constexpr double kLightness[] = {0.60, 0.74, 0.67}, kFirstHue = 212;
  std::vector<std::string> colours;
  // Steps of the golden section visit an arc evenly whatever their number.
  const auto add = [&](double start, double arc, std::int32_t step) {
    const double hue = start + arc * std::fmod(step * 0.618034, 1.0);
    colours.push_back(hex_colour(std::fmod(hue, 360), 0.62, kLightness[colours.size() % std::size(kLightness)]));
  };
  double total = 0, start = kFirstHue;
  for (const Family& family : families) total += std::sqrt(static_cast<double>(family.count));
  for (const Family& family : families) {
    const double arc = 360 * std::sqrt(static_cast<double>(family.count)) / total;
    for (std::int32_t i = 0; i < family.count; ++i) {
      if (families.size() <= kFew)
        add(start, 0.8 * arc, i);
      else
        add(kFirstHue, 360, family.first + i);
    }
    start += arc;
  }
  return colours;
}

// 1, 2 or 5 times a power of ten, for about `wanted` ticks.
double axis_step(double span, int wanted) {
  const double raw = span / wanted, power = std::pow(10, std::floor(std::log10(raw)));
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= raw) return factor * power;
  return 10 * power;
}

class Drawing {
 public:
  explicit Drawing(const PlanPicture& picture)
      : config_(picture.config),
        plan_(picture.plan),
        lengths_(picture.lengths),
        title_(picture.title),
        bars_(place(config_, plan_)),
        families_(families_of(lengths_)),
        colours_(request_colours(families_)) {
    for (const Bar& bar : bars_) makespan_ = std::max(makespan_, bar.end_ticks);
    ideal_ = static_cast<double>(unsplit_ticks(config_, lengths_).value()) / std::max(plan_.workers(), 1);
    span_ = std::max({static_cast<double>(makespan_), ideal_, 1.0});
    const double workers = std::max(plan_.workers(), 1);
    row_ = std::clamp(kPlotHeight / workers, workers > 300 ? 2.0 : 6.0, kMaxRow);
    bottom_ = kTop + row_ * workers;
  }

  std::string draw() {
    const std::size_t entries = std::min(families_.size(), kLegendEntries);
    const double legend_top = bottom_ + 64;
    const double height = legend_top + 20 * static_cast<double>((entries + kColumns - 1) / kColumns) + 40;
    const double width = kLeft + kPlotWidth + kRight;
    put("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
        "{1:.0f}\" "
        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222\">\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        width, height);
    heading();
    axis();
    bars();
    merges();
    marks();
    legend(legend_top);
    put("</svg>\n");
    return std::move(out_);
  }

 private:
  static constexpr std::size_t kColumns = 3;

  template <class... Args>
  void put(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), text, std::forward<Args>(args)...);
  }
  double x(double ticks) const { return kLeft + kPlotWidth * ticks / span_; }
  double y(std::int32_t worker) const { return kTop + row_ * worker; }
  const WorkRecord& record(const Bar& bar) const { return plan_.work_info_set[static_cast<std::size_t>(bar.record)]; }
  // Which query rows, in the terms of the op.
  std::string rows_text(const WorkRecord& work) const {
    if (config_.op == Op::decode) return fmt::format("rows {} to {}", work.row_begin, work.row_end);
    const std::int32_t tokens = lengths_.query_start.back();
    const std::int32_t first = work.row_begin % tokens - lengths_.query_start[static_cast<std::size_t>(work.request)];
    return fmt::format("head {}, query tokens {} to {}", work.row_begin / tokens, first,
                       first + work.row_end - work.row_begin);
  }
  // Prefill deals heads in groups: they get paler with their number, so that the groups are seen.
  std::string tint(const WorkRecord& work) const {
    if (config_.op == Op::decode) return "";
    const std::int32_t head = work.row_begin / lengths_.query_start.back();
    return fmt::format(" fill-opacity=\"{:.2f}\"", 1 - 0.5 * head / config_.heads);
  }
  bool split(std::int32_t tile) const {
    return plan_.reduce_indptr[static_cast<std::size_t>(tile) + 1] >
           plan_.reduce_indptr[static_cast<std::size_t>(tile)];
  }
  static std::string microseconds(double ticks) {
    return ticks < 1e7 ? fmt::format("{:.2f} µs", ticks / 1e3) : fmt::format("{:.3f} ms", ticks / 1e6);
  }

  void heading() {
    const std::int32_t split_tiles = plan_.work_meta_data[kMetaSplitTiles];
    const std::string title = title_.size() > kTitleChars ? title_.substr(0, kTitleChars) + " ..." : title_;
    const std::string splits = split_tiles == 0 ? "none of them split"
                                                : fmt::format("{} of them split into {} partials", split_tiles,
                                                              plan_.reduce_partial_map.size());
    put("<text x=\"{}\" y=\"28\" font-size=\"18\" font-weight=\"bold\">{}</text>\n", kLeft, escaped(title));
    put("<text x=\"{}\" y=\"48\">{} workers · {} requests · {} heads · tiles of up to {} rows · KV blocks of {} tokens "
        "· "
        "{} tiles, {} · {} records</text>\n",
        kLeft, plan_.workers(), lengths_.seq_lens.size(), config_.heads, config_.row_tile, config_.kv_block,
        plan_.reduce_final_map.size(), splits, plan_.work_info_set.size());
    std::int64_t busy = 0;
    for (const Bar& bar : bars_) busy += bar.end_ticks - bar.begin_ticks;
    const double room = static_cast<double>(makespan_) * plan_.workers();
    put("<text x=\"{}\" y=\"66\">estimated makespan {} · ideal {} (all work unsplit, shared out evenly) · "
        "workers {:.1f} % busy</text>\n",
        kLeft, microseconds(static_cast<double>(makespan_)), microseconds(ideal_),
        room > 0 ? 100 * static_cast<double>(busy) / room : 0.0);
  }

  void axis() {
    put("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{:.2f}\" fill=\"#f1f2f4\"/>\n", kLeft, kTop, kPlotWidth,
        bottom_ - kTop);
    put("<g stroke=\"#d5d8dd\" stroke-width=\"1\">\n");
    const double step = axis_step(span_, 10);
    const auto steps = static_cast<int>(span_ / step + 1e-9);
    for (int i = 0; i <= steps; ++i)
      put("<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\"/>\n", x(i * step), kTop, bottom_ + 5);
    put("</g>\n<g text-anchor=\"middle\" font-size=\"11\">\n");
    const bool milliseconds = span_ >= 1e7;
    for (int i = 0; i <= steps; ++i)
      put("<text x=\"{:.1f}\" y=\"{:.1f}\">{:g}</text>\n", x(i * step), bottom_ + 18,
          i * step / (milliseconds ? 1e6 : 1e3));
    put("<text x=\"{:.1f}\" y=\"{:.1f}\">estimated time, {}</text>\n", kLeft + kPlotWidth / 2, bottom_ + 35,
        milliseconds ? "ms" : "µs");
    put("</g>\n<g text-anchor=\"end\" font-size=\"{:.1f}\">\n", std::clamp(row_, 8.0, 11.0));
    std::int32_t every = 1;
    while (every * row_ < 11) every *= 2;
    for (std::int32_t w = 0; w < plan_.workers(); w += every)
      put("<text x=\"{}\" y=\"{:.1f}\">{}</text>\n", kLeft - 6, y(w) + row_ / 2 + 3.5, w);
    put("</g>\n<text transform=\"translate(14 {:.1f}) rotate(-90)\" text-anchor=\"middle\" "
        "font-size=\"11\">worker</text>\n",
        (kTop + bottom_) / 2);
  }

  void bars() {
    const double gap = row_ >= 12 ? 2 : row_ >= 5 ? 1 : 0.25;
    put("<g stroke-width=\"{}\">\n", row_ < 9 ? 0.4 : 0.7);
    for (const Bar& bar : bars_) {
      const WorkRecord& work = record(bar);
      const double left = x(static_cast<double>(bar.begin_ticks));
      const double width = std::max(x(static_cast<double>(bar.end_ticks)) - left, 0.2);
      const bool piece = split(work.tile);
      put("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"{} stroke=\"{}\"><title>"
          "request {}: {}, KV {} to {} ({} tokens){}&#10;worker {}, record {}, tile {}, {} to "
          "{}</title></rect>\n",
          left, y(bar.worker) + gap / 2, width, row_ - gap, colours_[static_cast<std::size_t>(work.request)],
          tint(work), piece ? "#1c1c1c" : "#ffffff", work.request, rows_text(work), work.kv_begin, work.kv_end,
          work.kv_end - work.kv_begin, piece ? ", a piece of a split tile" : "", bar.worker, bar.record, work.tile,
          microseconds(static_cast<double>(bar.begin_ticks)), microseconds(static_cast<double>(bar.end_ticks)));
    }
    put("</g>\n");
    if (row_ < 6) return;
    const double size = std::min(row_ - gap - 0.8, 11.0);
    put("<g text-anchor=\"middle\" font-size=\"{:.1f}\" pointer-events=\"none\">\n", size);
    for (const Bar& bar : bars_) {
      const std::string label = fmt::format("{}", record(bar).request);
      const double left = x(static_cast<double>(bar.begin_ticks)), right = x(static_cast<double>(bar.end_ticks));
      if (right - left < 0.62 * size * static_cast<double>(label.size()) + 4) continue;
      put("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", (left + right) / 2, y(bar.worker) + row_ / 2 + 0.36 * size,
          label);
    }
    put("</g>\n");
  }

  // The worker that ends a split tile's last piece joins its partials: a diamond there, a thread to every other piece.
  void merges() {
    std::vector<const Bar*> last(plan_.reduce_final_map.size(), nullptr);
    std::size_t pieces = 0;
    for (const Bar& bar : bars_) {
      const std::int32_t tile = record(bar).tile;
      if (!split(tile)) continue;
      ++pieces;
      const Bar*& latest = last[static_cast<std::size_t>(tile)];
      if (latest == nullptr || bar.end_ticks > latest->end_ticks) latest = &bar;
    }
    const auto centre = [&](const Bar& bar) { return y(bar.worker) + row_ / 2; };
    if (pieces <= kMaxJoinLines) {
      put("<g stroke=\"#333\" stroke-width=\"0.7\" stroke-opacity=\"0.35\">\n");
      for (const Bar& bar : bars_) {
        const Bar* to = last[static_cast<std::size_t>(record(bar).tile)];
        if (to == nullptr || to == &bar) continue;
        put("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", x(static_cast<double>(bar.end_ticks)),
            centre(bar), x(static_cast<double>(to->end_ticks)), centre(*to));
      }
      put("</g>\n");
    }
    put("<g fill=\"#111\" stroke=\"#ffffff\" stroke-width=\"0.8\">\n");
    for (std::size_t tile = 0; tile < last.size(); ++tile) {
      if (last[tile] == nullptr) continue;
      const WorkRecord& work = record(*last[tile]);
      diamond(x(static_cast<double>(last[tile]->end_ticks)), centre(*last[tile]), std::clamp(row_ * 0.45, 3.6, 6.0),
              fmt::format("request {}, tile {}: {} partials joined by worker {}", work.request, tile,
                          plan_.reduce_indptr[tile + 1] - plan_.reduce_indptr[tile], last[tile]->worker));
    }
    put("</g>\n");
  }

  void diamond(double cx, double cy, double r, const std::string& title) {
    put("<path d=\"M{0:.1f} {2:.1f}L{1:.1f} {3:.1f}L{0:.1f} {4:.1f}L{5:.1f} {3:.1f}Z\"><title>{6}</title></path>\n", cx,
        cx + r, cy - r, cy, cy + r, cx - r, escaped(title));
  }

  void marks() {
    if (makespan_ == 0) return;
    put("<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#0a7d34\" stroke-width=\"1.4\" "
        "stroke-dasharray=\"5 4\"><title>ideal {3}</title></line>\n",
        x(ideal_), kTop - 6, bottom_ + 3, microseconds(ideal_));
    put("<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2:.1f}\" stroke=\"#b3261e\" stroke-width=\"1.4\">"
        "<title>makespan {3}</title></line>\n",
        x(static_cast<double>(makespan_)), kTop - 6, bottom_ + 3, microseconds(static_cast<double>(makespan_)));
  }

  void legend(double top) {
    put("<g font-size=\"11\">\n<rect x=\"{}\" y=\"{:.1f}\" width=\"22\" height=\"10\" fill=\"#c9ced6\" "
        "stroke=\"#1c1c1c\" "
        "stroke-width=\"0.8\"/>\n<text x=\"{}\" y=\"{:.1f}\">a piece of a split tile</text>\n",
        kLeft, top - 9, kLeft + 28, top);
    put("<g fill=\"#111\">");
    diamond(kLeft + 172, top - 4, 5, "merge");
    put("</g>\n<text x=\"{}\" y=\"{:.1f}\">its partials are joined here</text>\n", kLeft + 182, top);
    mark_sample(kLeft + 350, top, "#0a7d34", " stroke-dasharray=\"5 4\"", "ideal");
    mark_sample(kLeft + 430, top, "#b3261e", "", "makespan");
    put("<text x=\"{}\" y=\"{:.1f}\">colour and number: the request{}</text>\n", kLeft + 540, top,
        config_.op == Op::decode ? "" : "; paler: later heads");

    // The heaviest families first when there are too many to list.
    std::vector<const Family*> shown;
    for (const Family& family : families_) shown.push_back(&family);
    const auto weight = [](const Family* f) { return static_cast<std::int64_t>(f->count) * (f->kv_tokens + 1); };
    if (shown.size() > kLegendEntries) {
      std::stable_sort(shown.begin(), shown.end(), [&](auto* a, auto* b) { return weight(a) > weight(b); });
      shown.resize(kLegendEntries);
    }
    for (std::size_t i = 0; i < shown.size(); ++i)
      legend_entry(*shown[i], kLeft + kPlotWidth / kColumns * static_cast<double>(i % kColumns),
                   top + 24 + 20 * static_cast<double>(i / kColumns));
    if (families_.size() > shown.size())
      put("<text x=\"{}\" y=\"{:.1f}\" fill=\"#666\">the {} with the most KV tokens; {} more are in the bars' "
          "titles</text>\n",
          kLeft, top + 26 + 20 * static_cast<double>((shown.size() + kColumns - 1) / kColumns), shown.size(),
          families_.size() - shown.size());
    put("</g>\n");
  }

  void mark_sample(double left, double top, const char* colour, const char* dash, const char* text) {
    put("<line x1=\"{0}\" y1=\"{1:.1f}\" x2=\"{2}\" y2=\"{1:.1f}\" stroke=\"{3}\" stroke-width=\"1.6\"{4}/>\n"
        "<text x=\"{5}\" y=\"{6:.1f}\">{7}</text>\n",
        left, top - 4, left + 24, colour, dash, left + 30, top, text);
  }

  void legend_entry(const Family& family, double left, double top) {
    constexpr std::int32_t kSwatches = 6;
    const std::int32_t swatches = std::min(family.count, kSwatches);
    for (std::int32_t i = 0; i < swatches; ++i)
      put("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"9\" height=\"10\" fill=\"{}\"/>\n", left + 9 * i, top - 9,
          colours_[static_cast<std::size_t>(family.first + i)]);
    const std::string who = family.count == 1
                                ? fmt::format("request {}", family.first)
                                : fmt::format("requests {} to {}", family.first, family.first + family.count - 1);
    put("<text x=\"{:.1f}\" y=\"{:.1f}\">{}: {} query token{}, {} KV tokens{}</text>\n", left + 9 * swatches + 6, top,
        who, family.query_tokens, family.query_tokens == 1 ? "" : "s", family.kv_tokens,
        family.count == 1 ? "" : " each");
  }

  const PlanConfig& config_;
  const Plan& plan_;
  StepLengths lengths_;
  std::string title_;
  std::vector<Bar> bars_;
  std::vector<Family> families_;
  std::vector<std::string> colours_;
  std::int64_t makespan_ = 0;
  double ideal_ = 0, span_ = 1, row_ = 1, bottom_ = 0;
  std::string out_;
};

}  // namespace

std::string plan_svg(const PlanPicture& picture) { return Drawing(picture).draw(); }

}  // namespace latte::cli
