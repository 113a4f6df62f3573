#include "store/segments/segment_allocator.h"

#include <algorithm>
#include <bit>
#include <string>

namespace tandem::store {
namespace {

constexpr size_t kMaxSeen = 4096;
constexpr uint64_t kDecayPeriod = 1 << 16;  // Requests after which demand counts half.
constexpr int kFirstLook = 8;               // Runs of the request's own bin that are tried first.

}  // namespace

Result<SegmentAllocator> SegmentAllocator::make(uint64_t capacity_bytes,
                                                const AllocatorOptions& options) {
  const uint64_t granule = options.granule_bytes;
  if (granule == 0 || capacity_bytes / granule == 0 || capacity_bytes / granule > kMaxGranules)
    return Error{Code::kConfig, "store.allocator",
                 std::to_string(capacity_bytes) + " bytes in granules of " +
                     std::to_string(granule) + ": give 1 to 2^30 granules",
                 "capacity_bytes"};
  SegmentAllocator allocator(options);
  allocator.reset(capacity_bytes / granule);
  allocator.insert_node(0, static_cast<uint32_t>(capacity_bytes / granule));
  return allocator;
}

void SegmentAllocator::reset(size_t num_granules) {
  tags_.clear();
  num_granules_ = num_granules;
  nodes_.clear();
  spare_nodes_.clear();
  bins_.assign(kNumBins, kNil);
  std::fill(std::begin(bin_bits_), std::end(bin_bits_), 0);
  for (auto& [length, size_class] : classes_) size_class.waiting.clear();
  num_used_ = num_waiting_ = 0;
}

uint32_t SegmentAllocator::bin_of(uint32_t length) {
  // Eight bins for each doubling of the length, so that the runs in a bin differ by at most an
  // eighth.
  if (length < 8) return length;
  const uint32_t exponent = static_cast<uint32_t>(std::bit_width(length)) - 1;
  return (exponent - 2) * 8 + ((length >> (exponent - 3)) & 7);
}

uint32_t SegmentAllocator::count_granules(uint64_t size_bytes) const {
  const uint64_t granule = options_.granule_bytes;
  const uint64_t count = size_bytes / granule + (size_bytes % granule != 0);
  return static_cast<uint32_t>(std::min(std::max<uint64_t>(count, 1), kMaxGranules + 1));
}

bool SegmentAllocator::allocate(const uint64_t* sizes, size_t count, uint64_t* offsets) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t start = allocate_one(count_granules(sizes[i]));
    if (start == kNil) {
      while (i-- > 0) (void)release(offsets[i], sizes[i]);
      return false;
    }
    offsets[i] = start * options_.granule_bytes;
  }
  return true;
}

uint32_t SegmentAllocator::allocate_one(uint32_t length) {
  if (length > num_granules_ - num_used_) return kNil;
  if (++num_requests_ % kDecayPeriod == 0) forget_idle_classes();
  SizeClass* size_class = learn(length);
  uint32_t start = kNil;
  for (int attempt = 0; attempt < 2 && start == kNil; ++attempt) {
    if (size_class == nullptr) {
      start = take_run(length, /*from_end=*/true);
    } else if (!size_class->waiting.empty() || carve_chunk(*size_class, length)) {
      start = size_class->waiting.back();
      size_class->waiting.pop_back();
      num_waiting_ -= length;
    }
    if (start == kNil) {
      if (num_waiting_ == 0) return kNil;
      merge_waiting();
    }
  }
  if (start == kNil) return kNil;
  mark(start, length, kUsed);
  num_used_ += length;
  return start;
}

SegmentAllocator::SizeClass* SegmentAllocator::learn(uint32_t length) {
  if (length * options_.granule_bytes > options_.max_class_bytes) return nullptr;
  if (const auto found = classes_.find(length); found != classes_.end()) {
    ++found->second.demand;
    return &found->second;
  }
  if (classes_.size() >= options_.max_classes) return nullptr;
  if (seen_.size() >= kMaxSeen) seen_.clear();
  if (++seen_[length] < options_.learn_after) return nullptr;
  seen_.erase(length);
  SizeClass& made = classes_[length];
  made.demand = options_.learn_after;
  return &made;
}

void SegmentAllocator::forget_idle_classes() {
  for (auto at = classes_.begin(); at != classes_.end();) {
    at->second.demand /= 2;
    if (at->second.demand > 0) {
      ++at;
      continue;
    }
    for (const uint32_t start : at->second.waiting) add_free(start, at->first);
    num_waiting_ -= at->second.waiting.size() * at->first;
    at = classes_.erase(at);
  }
}

bool SegmentAllocator::carve_chunk(SizeClass& size_class, uint32_t length) {
  // Cut fewer runs for a class as space gets scarce: its free runs must be merged back for other
  // sizes, which should be few.
  const uint64_t free = num_granules_ - num_used_ - num_waiting_;
  const uint64_t wanted =
      std::min(options_.chunk_bytes / options_.granule_bytes, free / (8 * classes_.size()));
  uint32_t count = static_cast<uint32_t>(std::max<uint64_t>(1, wanted / length));
  uint32_t start = kNil;
  for (; count > 0 && start == kNil; count /= 2) {
    start = take_run(count * length, /*from_end=*/false);
    if (start != kNil) break;
  }
  if (start == kNil) return false;
  for (uint32_t i = count; i-- > 0;) {
    mark(start + i * length, length, kWaiting);
    size_class.waiting.push_back(start + i * length);
  }
  num_waiting_ += uint64_t{count} * length;
  return true;
}

uint32_t SegmentAllocator::take_run(uint32_t length, bool from_end) {
  const uint32_t node = find_node(length);
  if (node == kNil) return kNil;
  const Node run = nodes_[node];
  remove_node(node);
  const uint32_t rest = run.length - length;
  const uint32_t start = from_end ? run.start + rest : run.start;
  if (rest > 0) insert_node(from_end ? run.start : run.start + length, rest);
  return start;
}

uint32_t SegmentAllocator::find_node(uint32_t length) const {
  const uint32_t own = bin_of(length);
  uint32_t node = bins_[own];
  for (int i = 0; i < kFirstLook && node != kNil; ++i, node = nodes_[node].next)
    if (nodes_[node].length >= length) return node;
  for (uint32_t bin = own + 1; bin < kNumBins;) {
    const uint64_t bits = bin_bits_[bin / 64] >> (bin % 64);
    if (bits != 0) return bins_[bin + static_cast<uint32_t>(std::countr_zero(bits))];
    bin = (bin / 64 + 1) * 64;
  }
  for (; node != kNil; node = nodes_[node].next)
    if (nodes_[node].length >= length) return node;
  return kNil;
}

Status SegmentAllocator::release(uint64_t offset, uint64_t size_bytes) {
  const uint32_t length = count_granules(size_bytes);
  const uint64_t start = offset / options_.granule_bytes;
  if (offset % options_.granule_bytes != 0 || start >= num_granules_ ||
      tags_.get(static_cast<uint32_t>(start)) != (length << 2 | kUsed))
    return {Code::kConflict, "store.release",
            "no run of " + std::to_string(size_bytes) + " bytes is allocated at offset " +
                std::to_string(offset)};
  num_used_ -= length;
  const uint32_t first = static_cast<uint32_t>(start);
  if (const auto found = classes_.find(length); found != classes_.end()) {
    mark(first, length, kWaiting);
    found->second.waiting.push_back(first);
    num_waiting_ += length;
  } else {
    add_free(first, length);
  }
  return {};
}

void SegmentAllocator::merge_waiting() {
  for (auto& [length, size_class] : classes_) {
    for (const uint32_t start : size_class.waiting) add_free(start, length);
    size_class.waiting.clear();
  }
  num_waiting_ = 0;
}

void SegmentAllocator::add_free(uint32_t start, uint32_t length) {
  tags_.set(start, 0);  // What is inside a run has no tag.
  if (start > 0 && (tags_.get(start - 1) & 3) == kFree) {
    const uint32_t node = tags_.get(start - 1) >> 2;
    const Node before = nodes_[node];
    remove_node(node);
    start = before.start;
    length += before.length;
  }
  const uint32_t end = start + length;
  if (end < num_granules_ && (tags_.get(end) & 3) == kFree) {
    const uint32_t node = tags_.get(end) >> 2;
    length += nodes_[node].length;
    remove_node(node);
  }
  insert_node(start, length);
}

void SegmentAllocator::insert_node(uint32_t start, uint32_t length) {
  uint32_t node;
  if (spare_nodes_.empty()) {
    node = static_cast<uint32_t>(nodes_.size());
    nodes_.emplace_back();
  } else {
    node = spare_nodes_.back();
    spare_nodes_.pop_back();
  }
  const uint32_t bin = bin_of(length);
  nodes_[node] = {start, length, kNil, bins_[bin]};
  if (bins_[bin] != kNil) nodes_[bins_[bin]].previous = node;
  bins_[bin] = node;
  bin_bits_[bin / 64] |= uint64_t{1} << (bin % 64);
  tags_.set(start, node << 2 | kFree);
  tags_.set(start + length - 1, node << 2 | kFree);
}

void SegmentAllocator::remove_node(uint32_t node) {
  const Node run = nodes_[node];
  const uint32_t bin = bin_of(run.length);
  if (run.previous == kNil) {
    bins_[bin] = run.next;
    if (run.next == kNil) bin_bits_[bin / 64] &= ~(uint64_t{1} << (bin % 64));
  } else {
    nodes_[run.previous].next = run.next;
  }
  if (run.next != kNil) nodes_[run.next].previous = run.previous;
  tags_.set(run.start, 0);
  tags_.set(run.start + run.length - 1, 0);
  spare_nodes_.push_back(node);
}

void SegmentAllocator::mark(uint32_t start, uint32_t length, State state) {
  // A run in use needs no tag at its end, because merging only asks whether a neighbour is free.
  tags_.set(start, length << 2 | state);
}

Status SegmentAllocator::rebuild(const uint64_t* offsets, const uint64_t* sizes, size_t count) {
  const size_t num_granules = num_granules_;
  reset(num_granules);
  uint64_t cursor = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t start = offsets[i] / options_.granule_bytes;
    const uint32_t length = count_granules(sizes[i]);
    if (offsets[i] % options_.granule_bytes != 0 || start < cursor ||
        start + length > num_granules) {
      reset(num_granules);
      insert_node(0, static_cast<uint32_t>(num_granules));
      return {Code::kCorruption, "store.rebuild",
              "range " + std::to_string(i) + " of " + std::to_string(sizes[i]) +
                  " bytes at offset " + std::to_string(offsets[i]) +
                  " overlaps another, leaves the segment or is not aligned"};
    }
    if (start > cursor)
      insert_node(static_cast<uint32_t>(cursor), static_cast<uint32_t>(start - cursor));
    mark(static_cast<uint32_t>(start), length, kUsed);
    num_used_ += length;
    cursor = start + length;
  }
  if (cursor < num_granules)
    insert_node(static_cast<uint32_t>(cursor), static_cast<uint32_t>(num_granules - cursor));
  return {};
}

Status SegmentAllocator::grow(uint64_t capacity_bytes) {
  const uint64_t num_granules = capacity_bytes / options_.granule_bytes;
  const uint64_t before = num_granules_;
  if (num_granules < before || num_granules > kMaxGranules)
    return {Code::kConfig, "store.grow",
            std::to_string(capacity_bytes) + " bytes: a segment of " +
                std::to_string(this->capacity_bytes()) + " can only grow, to 2^30 granules"};
  num_granules_ = num_granules;
  if (num_granules > before)
    add_free(static_cast<uint32_t>(before), static_cast<uint32_t>(num_granules - before));
  return {};
}

uint64_t SegmentAllocator::find_largest_free_bytes() {
  merge_waiting();
  uint32_t largest = 0;
  for (uint32_t bin = kNumBins; bin-- > 0 && largest == 0;)
    for (uint32_t node = bins_[bin]; node != kNil; node = nodes_[node].next)
      largest = std::max(largest, nodes_[node].length);
  return largest * options_.granule_bytes;
}

}  // namespace tandem::store
