// Text tables with aligned columns.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace latte::cli {

// A column is aligned right when its heading starts with '>' (the mark is not printed): numbers.
class Table {
 public:
  explicit Table(std::vector<std::string> headings) {
    for (std::string& heading : headings) {
      const bool right = !heading.empty() && heading.front() == '>';
      right_.push_back(right);
      headings_.push_back(right ? heading.substr(1) : std::move(heading));
    }
  }

  void add(std::vector<std::string> cells) {
    cells.resize(headings_.size());
    rows_.push_back(std::move(cells));
  }
  bool empty() const { return rows_.empty(); }

  std::string text(const std::string& indent = "") const {
    std::vector<std::size_t> widths;
    for (const std::string& heading : headings_) widths.push_back(columns(heading));
    for (const auto& row : rows_)
      for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], columns(row[c]));
    std::string result = line(headings_, widths, indent);
    std::vector<std::string> rules;
    for (std::size_t width : widths) rules.push_back(std::string(width, '-'));
    result += line(rules, widths, indent);
    for (const auto& row : rows_) result += line(row, widths, indent);
    return result;
  }

 private:
  // Code points, not bytes: continuation bytes of UTF-8 take no column.
  static std::size_t columns(const std::string& text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
  }

  std::string line(const std::vector<std::string>& cells, const std::vector<std::size_t>& widths,
                   const std::string& indent) const {
    std::string result = indent;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string pad(widths[c] - columns(cells[c]), ' ');
      if (c > 0) result += "  ";
      result += right_[c] ? pad + cells[c] : cells[c] + pad;
    }
    result.erase(result.find_last_not_of(' ') + 1);
    return result + "\n";
  }

  std::vector<std::string> headings_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace latte::cli
