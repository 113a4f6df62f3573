// Examples of the allocator; tests/store/parts/test_allocator_props.py compares it with a model.
#include "store/segments/segment_allocator.h"

#include "base/test.h"
#include "store/reads/chunk_checksum.h"
#include "transfer/wire/crc32c.h"

namespace tandem::store {
namespace {

SegmentAllocator make(uint64_t granules) {
  return SegmentAllocator::make(granules * 512, AllocatorOptions{}).value();
}

TEST(segment_allocator_takes_everything_and_gives_it_back) {
  SegmentAllocator space = make(100);
  const uint64_t sizes[] = {512, 513, 97 * 512};
  uint64_t offsets[3];
  CHECK(space.allocate(sizes, 3, offsets));
  CHECK_EQ(space.used_bytes(), 100u * 512);
  CHECK(!space.allocate(sizes, 1, offsets));
  for (int i = 0; i < 3; ++i) CHECK(space.release(offsets[i], sizes[i]).is_ok());
  CHECK_EQ(space.find_largest_free_bytes(), 100u * 512);
}

TEST(segment_allocator_batches_are_all_or_nothing) {
  SegmentAllocator space = make(10);
  const uint64_t sizes[] = {5 * 512, 5 * 512, 512};
  uint64_t offsets[3];
  CHECK(!space.allocate(sizes, 3, offsets));
  CHECK_EQ(space.used_bytes(), 0u);
  CHECK(space.allocate(sizes, 2, offsets));
}

TEST(segment_allocator_lends_the_runs_of_one_class_to_another) {
  SegmentAllocator space = make(64);
  const uint64_t small = 512, large = 32 * 512;
  std::vector<uint64_t> offsets(64);
  for (uint64_t& offset : offsets) CHECK(space.allocate(&small, 1, &offset));
  for (const uint64_t offset : offsets) CHECK(space.release(offset, small).is_ok());
  uint64_t pair[2];
  CHECK(space.allocate(&large, 1, &pair[0]) && space.allocate(&large, 1, &pair[1]));
}

TEST(segment_allocator_refuses_wrong_releases) {
  SegmentAllocator space = make(16);
  const uint64_t size = 1024;
  uint64_t offset;
  CHECK(space.allocate(&size, 1, &offset));
  CHECK(!space.release(offset + 512, size).is_ok());
  CHECK(!space.release(offset, 512).is_ok());
  CHECK(!space.release(uint64_t{1} << 60, size).is_ok());
  CHECK(space.release(offset, size).is_ok());
  CHECK(!space.release(offset, size).is_ok());
}

TEST(segment_allocator_rebuilds_and_grows) {
  SegmentAllocator space = make(16);
  const uint64_t offsets[] = {512, 4 * 512}, sizes[] = {512, 2 * 512};
  CHECK(space.rebuild(offsets, sizes, 2).is_ok());
  CHECK_EQ(space.used_bytes(), 3u * 512);
  CHECK_EQ(space.find_largest_free_bytes(), 10u * 512);
  CHECK(space.grow(20 * 512).is_ok());
  CHECK_EQ(space.find_largest_free_bytes(), 14u * 512);
  const uint64_t overlapping[] = {512, 512};
  CHECK(!space.rebuild(overlapping, sizes, 2).is_ok());
  CHECK_EQ(space.used_bytes(), 0u);
}

TEST(checksum_chunks_equals_one_chunk_at_a_time) {
  std::vector<uint8_t> data(1000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 31 + i / 7);
  for (const size_t chunk : {1u, 8u, 64u, 100u, 333u, 1000u, 2000u}) {
    std::vector<uint32_t> sums((data.size() + chunk - 1) / chunk);
    checksum_chunks(data.data(), data.size(), chunk, sums.data());
    for (size_t i = 0; i < sums.size(); ++i) {
      const size_t length = std::min(chunk, data.size() - i * chunk);
      CHECK_EQ(sums[i], transfer::crc32c_portable(0, &data[i * chunk], length));
    }
  }
}

}  // namespace
}  // namespace tandem::store
