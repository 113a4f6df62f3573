#include "base/machine/sysfs.h"

#include "base/test.h"

namespace tandem {
namespace {

TEST(cpu_lists_are_sorted_and_unique) {
  const auto ids = parse_cpu_list("8,0-2,1\n");
  CHECK(ids.has_value());
  CHECK((*ids == std::vector<int>{0, 1, 2, 8}));
  CHECK(parse_cpu_list("")->empty());
}

TEST(damaged_cpu_lists_are_refused) {
  for (const char* text : {"a", "1-", "-1", "3-1", "1,,2", "0-4294967295", "0x3", "1 2"})
    CHECK(!parse_cpu_list(text).has_value());
}

TEST(sizes_are_found_by_their_whole_key) {
  const char* text = "Node 0 MemTotalX:  1 kB\nNode 0 MemTotal:   2048 kB\nHugePages_Free: 3\n";
  CHECK_EQ(find_size_bytes(text, "MemTotal").value_or(-1), 2048 * 1024);
  CHECK_EQ(find_size_bytes(text, "HugePages_Free").value_or(-1), 3);
  CHECK(!find_size_bytes(text, "Total").has_value());
  CHECK(!find_size_bytes("MemTotal: 99999999999999999999 kB", "MemTotal").has_value());
}

TEST(integers_must_be_the_whole_text) {
  CHECK_EQ(parse_int(" -1\n").value_or(0), -1);
  CHECK(!parse_int("1.5").has_value());
  CHECK(!parse_int("").has_value());
}

TEST(missing_files_and_folders_are_empty) {
  const Root root("/nonexistent/");
  CHECK(!root.is_live());
  CHECK(!root.read_text("/proc/meminfo").has_value());
  CHECK(root.list_folder("/sys").empty());
}

}  // namespace
}  // namespace tandem
