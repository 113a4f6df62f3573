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
  // `prefix` is put before every absolute path; "" or "/" means this machine.
  explicit Root(std::string prefix = "");

  bool is_live() const { return prefix_.empty(); }
  std::string resolve(std::string_view absolute_path) const;

  // Returns a file's text without trailing white space, at most 1 MiB of it.
  std::optional<std::string> read_text(std::string_view absolute_path) const;
  // Returns the number in a file that consists of one decimal integer.
  std::optional<int64_t> read_int(std::string_view absolute_path) const;
  // Returns the ids in a list of CPUs or nodes such as "0-3,8".
  std::optional<std::vector<int>> read_list(std::string_view absolute_path) const;
  // Returns the names in a folder, sorted; empty if there is no such folder.
  std::vector<std::string> list_folder(std::string_view absolute_path) const;

 private:
  std::string prefix_;
};

std::vector<std::string> split(std::string_view text, char separator);
std::optional<int64_t> parse_int(std::string_view text);

// Parses a list of ids such as "0-3,8"; the result is sorted and has no duplicates. Returns nothing
// if the text is malformed or has an id of 65536 or more: the kernel's own limit is 8192 CPUs, and
// a damaged file must not exhaust memory.
std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

// Returns the number after `key` in the text of a "key: 123 kB" file, times 1024 if "kB" follows.
std::optional<int64_t> find_size_bytes(std::string_view text, std::string_view key);

}  // namespace tandem
