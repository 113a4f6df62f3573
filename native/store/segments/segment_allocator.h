// The allocator of a host's segment. It decides on offsets and never touches the memory.
//
// Space is tiled with runs of whole granules. A small size that recurs becomes a class: its runs
// are cut side by side out of one larger run, and a released one stays in the class's list for the
// next object of that size. All other requests are cut from the smallest bin of free runs that
// fits, and merge with free neighbours when released. When no run fits, all free runs of classes
// are merged with their neighbours, and the search is repeated; so a request fails only if no
// contiguous free space of its size exists.
//
// A run has a tag at its first granule, a free one also at its last (Knuth's boundary tags), kept
// apart from the memory, since the memory is another process's. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "store/reads/tag_table.h"

namespace tandem::store {

struct AllocatorOptions {
  uint64_t granule_bytes = 512;
  uint64_t chunk_bytes = 1u << 20;  // What a class cuts its runs from, at most.
  // Largest size that can become a class. Runs of larger sizes merge at once when released: keeping
  // them for their own size saves little time and wastes space. The KV blocks of five models,
  // oldest evicted first, filled 0.90 of 4 GiB with classes and 0.998 without.
  uint64_t max_class_bytes = 64u << 10;
  uint32_t learn_after = 8;          // Requests of one size that make it a class.
  uint32_t max_classes = 64;
};

class SegmentAllocator {
 public:
  static constexpr uint64_t kMaxGranules = uint64_t{1} << 30;

  // Errors: kConfig (no granule, or more than kMaxGranules).
  static Result<SegmentAllocator> make(uint64_t capacity_bytes, const AllocatorOptions& options);

  // Sets offsets[0..count) to free runs of these sizes, or sets nothing and returns false. A size
  // of 0 takes one granule.
  bool allocate(const uint64_t* sizes, size_t count, uint64_t* offsets);
  // Frees a run. Errors: kConflict if no run of that size was allocated at that offset.
  Status release(uint64_t offset, uint64_t size_bytes);
  // Forgets all runs and takes the given ranges, sorted by offset. Errors: kCorruption if they
  // overlap, leave the segment or are not aligned to the granule; everything is free then.
  Status rebuild(const uint64_t* offsets, const uint64_t* sizes, size_t count);
  // Raises the capacity. Errors: kConfig if it is smaller than before or too large.
  Status grow(uint64_t capacity_bytes);

  uint64_t capacity_bytes() const { return num_granules_ * options_.granule_bytes; }
  uint64_t used_bytes() const { return num_used_ * options_.granule_bytes; }
  // Merges free runs, and returns the size of the largest one.
  uint64_t find_largest_free_bytes();
  size_t num_classes() const { return classes_.size(); }

 private:
  enum State : uint32_t { kNone = 0, kFree = 1, kUsed = 2, kWaiting = 3 };

  struct Node {  // A free run.
    uint32_t start = 0;
    uint32_t length = 0;
    uint32_t previous = 0;
    uint32_t next = 0;
  };

  struct SizeClass {
    std::vector<uint32_t> waiting;
    uint32_t demand = 0;
  };

  static constexpr uint32_t kNil = 0xffffffff;
  static constexpr uint32_t kNumBins = 31 * 8;

  explicit SegmentAllocator(const AllocatorOptions& options) : options_(options) {}

  static uint32_t bin_of(uint32_t length);
  uint32_t count_granules(uint64_t size_bytes) const;
  uint32_t allocate_one(uint32_t length);
  uint32_t take_run(uint32_t length, bool from_end);
  uint32_t find_node(uint32_t length) const;
  bool carve_chunk(SizeClass& size_class, uint32_t length);
  SizeClass* learn(uint32_t length);
  void forget_idle_classes();
  void merge_waiting();
  void add_free(uint32_t start, uint32_t length);
  void insert_node(uint32_t start, uint32_t length);
  void remove_node(uint32_t node);
  void mark(uint32_t start, uint32_t length, State state);
  void reset(size_t num_granules);

  AllocatorOptions options_;
  TagTable tags_;  // State in the low two bits; above: length, or node if free.
  uint64_t num_granules_ = 0;
  std::vector<Node> nodes_;
  std::vector<uint32_t> spare_nodes_;
  std::vector<uint32_t> bins_;
  uint64_t bin_bits_[4] = {};
  std::unordered_map<uint32_t, SizeClass> classes_;
  std::unordered_map<uint32_t, uint32_t> seen_;  // Sizes on their way to a class.
  uint64_t num_used_ = 0;
  uint64_t num_waiting_ = 0;
  uint64_t num_requests_ = 0;
};

}  // namespace tandem::store
