// Examples of headers: round trips, and refusal of each flipped bit, cut and misplacement.
#include "store/segments/object_header.h"

#include <string>
#include <vector>

#include "base/test.h"

namespace tandem::store {
namespace {

constexpr ObjectHeader kHeader{.key = "some key",
                               .size = 123'456,
                               .version = uint64_t{5} << 40 | 77,
                               .checksum = 0xdeadbeef,
                               .soft_pin_ms = 1234,
                               .wanted = 3,
                               .hard_pin = true,
                               .home = 0x0123456789abcdef,
                               .position = 4096};

std::vector<uint8_t> write(const ObjectHeader& header) {
  std::vector<uint8_t> data(kHeaderBytes + header.key.size(), 0xee);
  write_header(data.data(), header);
  return data;
}

std::optional<ObjectHeader> read(const std::vector<uint8_t>& data) {
  return read_header(data.data(), data.size(), kHeader.home, kHeader.position);
}

TEST(a_header_comes_back_as_it_was) {
  const std::vector<uint8_t> data = write(kHeader);
  const auto header = read(data);
  CHECK(header.has_value());
  CHECK(header->key == kHeader.key);
  CHECK_EQ(header->size, kHeader.size);
  CHECK_EQ(header->version, kHeader.version);
  CHECK_EQ(header->checksum, kHeader.checksum);
  CHECK_EQ(header->soft_pin_ms, kHeader.soft_pin_ms);
  CHECK_EQ(header->wanted, kHeader.wanted);
  CHECK(header->hard_pin);
}

TEST(no_flipped_bit_of_a_header_is_believed) {
  std::vector<uint8_t> data = write(kHeader);
  for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= 1u << bit % 8;
    CHECK(!read(data).has_value());
    data[bit / 8] ^= 1u << bit % 8;
  }
  CHECK(read(data).has_value());
}

TEST(a_header_that_is_cut_off_or_elsewhere_is_not_believed) {
  const std::vector<uint8_t> data = write(kHeader);
  for (size_t size = 0; size < data.size(); ++size)
    CHECK(!read_header(data.data(), size, kHeader.home, kHeader.position).has_value());
  CHECK(!read_header(data.data(), data.size(), kHeader.home + 1, kHeader.position).has_value());
  CHECK(!read_header(data.data(), data.size(), kHeader.home, 8192).has_value());
}

TEST(a_version_that_no_master_gives_is_not_believed) {
  ObjectHeader header = kHeader;
  header.version = kMaxVersion + 1;
  CHECK(!read(write(header)).has_value());
}

}  // namespace
}  // namespace tandem::store
