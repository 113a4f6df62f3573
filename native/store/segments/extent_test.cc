// Examples of seals: the bytes that are written, and the requests that are refused without writing
// anything.
#include "store/segments/extent.h"

#include <cstring>
#include <string>
#include <vector>

#include "base/test.h"
#include "store/reads/chunk_checksum.h"

namespace tandem::store {
namespace {

// A segment of 1 MiB, and a copy of its earlier content.
struct Memory {
  std::vector<uint8_t> marks = std::vector<uint8_t>(2048);
  std::vector<uint8_t> data = std::vector<uint8_t>(1u << 20, 0xee);

  SegmentMemory view() { return {marks.data(), marks.size(), data.data(), data.size()}; }
  bool is_untouched() const { return *this == Memory{}; }
  bool operator==(const Memory& other) const {
    return marks == other.marks && data == other.data;
  }
};

Object make_object(std::string_view key, uint64_t offset, const std::string& value) {
  const Value seen{reinterpret_cast<const uint8_t*>(value.data()), value.size()};
  uint32_t checksum;
  checksum_values(&seen, 1, kChunkBytes, &checksum, nullptr);
  return {key, offset, value.size(), 7, checksum, 1, 0, false};
}

TEST(seal_objects_writes_values_tables_and_marks) {
  Memory memory;
  const std::string first(100'000, 'a'), second = "b";
  const std::vector<Object> objects = {make_object("one", 512, first),
                                       make_object("two", 512 * 400, second)};
  CHECK(seal_objects(memory.view(), objects, Missing::kValues, first + second).is_ok());
  CHECK_EQ(memory.marks[1], kMark);
  CHECK_EQ(memory.marks[400], kMark);
  const uint8_t* extent = memory.data.data() + 512;
  CHECK(std::memcmp(extent, "TOBJ", 4) == 0);
  CHECK(std::memcmp(extent + kHeaderBytes, "one", 3) == 0);
  CHECK(std::memcmp(extent + value_offset(3, first.size()), first.data(), first.size()) == 0);
  // No byte behind the value was written.
  const uint64_t end = 512 + value_offset(3, first.size()) + first.size();
  CHECK_EQ(memory.data[end], 0xee);
}

TEST(seal_objects_refuses_all_for_one) {
  Memory memory;
  const std::string value = "value";
  const Object good = make_object("good", 0, value);
  Object wrong = make_object("wrong", 4096, value);
  wrong.checksum ^= 1;
  Status status = seal_objects(memory.view(), {good, wrong}, Missing::kValues, value + value);
  CHECK(!status.is_ok() && status.error().code == Code::kCorruption);
  wrong = make_object("inside", 0, value);
  status = seal_objects(memory.view(), {good, wrong}, Missing::kValues, value + value);
  CHECK(!status.is_ok() && status.error().code == Code::kConflict);
  for (const uint64_t offset : {uint64_t{100}, uint64_t{1} << 20, ~uint64_t{511}}) {
    wrong = make_object("outside", offset, value);
    status = seal_objects(memory.view(), {good, wrong}, Missing::kValues, value + value);
    CHECK(!status.is_ok() && status.error().code == Code::kConfig);
  }
  status = seal_objects(memory.view(), {good}, Missing::kValues, value + "x");
  CHECK(!status.is_ok() && status.error().code == Code::kCorruption);
  status = seal_objects(memory.view(), {good}, Missing::kTables, "\1\2\3\4");
  CHECK(!status.is_ok() && status.error().code == Code::kCorruption);
  CHECK(memory.is_untouched());
}

TEST(seal_objects_refuses_what_an_object_reaches_into) {
  Memory memory;
  const std::string small = "x", large(5000, 'y');
  CHECK(seal_objects(memory.view(), {make_object("small", 2048, small)}, Missing::kValues, small)
            .is_ok());
  const Status status =
      seal_objects(memory.view(), {make_object("large", 0, large)}, Missing::kValues, large);
  CHECK(!status.is_ok() && status.error().code == Code::kConflict);
}

}  // namespace
}  // namespace tandem::store
