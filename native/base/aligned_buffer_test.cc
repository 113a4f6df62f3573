#include "base/aligned_buffer.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/test.h"
#include "base/machine/topology.h"

namespace tandem {
namespace {

TEST(buffers_are_aligned_zeroed_and_writable_to_the_last_byte) {
  for (const bool hugepages : {false, true}) {
    for (const size_t size : {size_t{1}, size_t{4097}, (size_t{2} << 20) + 1}) {
      auto result = AlignedBuffer::allocate(size, {hugepages, std::nullopt});
      CHECK(result.is_ok());
      AlignedBuffer& buffer = result.value();
      const size_t alignment = hugepages ? size_t{2} << 20 : size_t{64};
      CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
      CHECK(std::all_of(buffer.data(), buffer.data() + size, [](uint8_t x) { return x == 0; }));
      std::fill_n(buffer.data(), buffer.capacity_bytes(), uint8_t{255});
      CHECK(buffer.capacity_bytes() >= size);
    }
  }
}

TEST(impossible_sizes_are_errors) {
  for (const bool hugepages : {false, true}) {
    CHECK(AlignedBuffer::allocate(0, {hugepages, std::nullopt}).error().code == Code::kConfig);
    for (const size_t size : {SIZE_MAX, SIZE_MAX / 2, size_t{1} << 50})
      CHECK(AlignedBuffer::allocate(size, {hugepages, std::nullopt}).error().code ==
            Code::kCapacity);
  }
  CHECK(AlignedBuffer::allocate(64, {false, 4096}).error().code == Code::kNotFound);
  CHECK(AlignedBuffer::allocate(64, {false, -1}).error().code == Code::kNotFound);
}

TEST(pages_lie_on_the_node_that_is_asked_for) {
  for (const NumaNode& node : read_topology().numa_nodes)
    for (const bool hugepages : {false, true}) {
      auto buffer = AlignedBuffer::allocate(size_t{4} << 20, {hugepages, node.node_id});
      CHECK(buffer.is_ok());
      std::fill_n(buffer.value().data(), buffer.value().size_bytes(), uint8_t{1});
      Result<int> found = find_page_node(buffer.value().data() + (size_t{3} << 20));
      // Both calls may be refused; a granted wish is a preference that an empty node can meet.
      if (buffer.value().has_node() && found.is_ok()) CHECK_EQ(found.value(), node.node_id);
    }
  CHECK(!AlignedBuffer::allocate(64, {}).value().has_node());
}

TEST(a_moved_buffer_is_freed_once) {
  auto first = AlignedBuffer::allocate(64, {});
  AlignedBuffer second = std::move(first.value());
  second.data()[0] = 1;
  auto third = AlignedBuffer::allocate(64, {});
  third.value() = std::move(second);
  CHECK_EQ(third.value().data()[0], 1);
}

}  // namespace
}  // namespace tandem
