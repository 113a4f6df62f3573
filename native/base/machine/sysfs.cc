#include "base/machine/sysfs.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

namespace tandem {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr int kMaxCpuId = 65535;
constexpr std::string_view kSpace = " \t\r\n";

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

}  // namespace

Root::Root(std::string prefix) : prefix_(std::move(prefix)) {
  while (!prefix_.empty() && prefix_.back() == '/') prefix_.pop_back();
}

std::string Root::resolve(std::string_view absolute_path) const {
  return prefix_ + std::string(absolute_path);
}

std::optional<std::string> Root::read_text(std::string_view absolute_path) const {
  std::ifstream file(resolve(absolute_path), std::ios::binary);
  if (!file) return std::nullopt;
  // Files of /proc report size 0, so they are read until they end.
  std::string text;
  char chunk[4096];
  while (text.size() < kMaxFileBytes && (file.read(chunk, sizeof chunk) || file.gcount() > 0))
    text.append(chunk, static_cast<size_t>(file.gcount()));
  if (file.bad()) return std::nullopt;
  text.erase(text.find_last_not_of(kSpace) + 1);
  return text;
}

std::optional<int64_t> Root::read_int(std::string_view absolute_path) const {
  const auto text = read_text(absolute_path);
  return text ? parse_int(*text) : std::nullopt;
}

std::optional<std::vector<int>> Root::read_list(std::string_view absolute_path) const {
  const auto text = read_text(absolute_path);
  return text ? parse_cpu_list(*text) : std::nullopt;
}

std::vector<std::string> Root::list_folder(std::string_view absolute_path) const {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(resolve(absolute_path), error), end;
  for (; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::optional<int64_t> parse_int(std::string_view text) {
  text = trim(text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  std::vector<int> ids;
  text = trim(text);
  if (text.empty()) return ids;
  for (const std::string& part : split(text, ',')) {
    const size_t dash = part.find('-');
    const auto first = parse_int(std::string_view(part).substr(0, dash));
    const auto last =
        dash == std::string::npos ? first : parse_int(std::string_view(part).substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last > kMaxCpuId) return std::nullopt;
    for (int64_t id = *first; id <= *last; ++id) ids.push_back(static_cast<int>(id));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

std::optional<int64_t> find_size_bytes(std::string_view text, std::string_view key) {
  const std::string wanted = std::string(key) + ":";
  for (const std::string& line : split(text, '\n')) {
    // A node's meminfo puts "Node 0 " before the key.
    const size_t at = line.find(wanted);
    if (at == std::string::npos || (at > 0 && line[at - 1] != ' ')) continue;
    std::string_view rest = trim(std::string_view(line).substr(at + wanted.size()));
    const bool is_kib = rest.ends_with("kB");
    if (is_kib) rest.remove_suffix(2);
    const auto number = parse_int(rest);
    if (!number || *number < 0 || *number > (INT64_MAX >> 10)) return std::nullopt;
    return is_kib ? *number * 1024 : *number;
  }
  return std::nullopt;
}

}  // namespace tandem
