// Reading of /proc and /sys. Every path goes through a Root, so that a test can show the readers
// the recorded tree of another machine. A missing or malformed file is an empty optional: which
// files exist differs between kernels and containers, and none of them is owed to us.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

class Root {
 public:
  // `prefix` stands before every absolute path; "" or "/" is this machine.
  explicit Root(std::string prefix = "");

  bool is_live() const { return prefix_.empty(); }
  std::string resolve(std::string_view absolute_path) const;

  // The file's text without its trailing white space; at most 1 MiB of it.
  std::optional<std::string> read_text(std::string_view absolute_path) const;
  // A decimal integer that is the whole file.
  std::optional<int64_t> read_int(std::string_view absolute_path) const;
  // A cpu or node list such as "0-3,8".
  std::optional<std::vector<int>> read_list(std::string_view absolute_path) const;
  // Names in a folder, sorted; empty if there is none.
  std::vector<std::string> list_folder(std::string_view absolute_path) const;

 private:
  std::string prefix_;
};

std::vector<std::string> split(std::string_view text, char separator);
std::optional<int64_t> parse_int(std::string_view text);

// Sorted and without duplicates. Refuses (empty optional) what is malformed or names an id of
// 65536 or more: the kernel's own limit is 8192 CPUs, and a damaged file must not exhaust memory.
std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

// The number after `key` in a "key: 123 kB" file, times 1024 when followed by "kB".
std::optional<int64_t> find_size_bytes(std::string_view text, std::string_view key);

}  // namespace tandem
