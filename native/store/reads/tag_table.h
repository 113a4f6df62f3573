// A hash table from granule to tag: linear probing, 8 bytes an entry, at most three quarters full.
//
// An array with a tag for each granule would use a memory page for each object of some megabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tandem::store {

class TagTable {
 public:
  TagTable() { clear(); }

  void clear() {
    slots_.assign(kMinSlots, Slot{});
    num_entries_ = 0;
  }

  // Returns the tag of a granule; 0 without one.
  uint32_t get(uint32_t granule) const {
    for (size_t at = home(granule);; at = next(at)) {
      if (slots_[at].tag == 0) return 0;
      if (slots_[at].granule == granule) return slots_[at].tag;
    }
  }

  // Sets the tag of a granule. A tag of 0 removes the entry.
  void set(uint32_t granule, uint32_t tag) {
    size_t at = home(granule);
    while (slots_[at].tag != 0 && slots_[at].granule != granule) at = next(at);
    if (tag == 0) {
      if (slots_[at].tag != 0) erase(at);
      return;
    }
    const bool is_new = slots_[at].tag == 0;
    slots_[at] = {granule, tag};
    if (is_new && ++num_entries_ * 4 > slots_.size() * 3) grow();
  }

 private:
  struct Slot {
    uint32_t granule = 0;
    uint32_t tag = 0;
  };
  static constexpr size_t kMinSlots = 16;

  // Fibonacci hashing: it spreads granules, which come in arithmetic sequences.
  size_t home(uint32_t granule) const {
    return (granule * uint64_t{0x9e3779b97f4a7c15}) >> 32 & (slots_.size() - 1);
  }
  size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }

  // Moves displaced entries back into the gap, so that the table needs no markers of removed
  // entries.
  void erase(size_t gap) {
    --num_entries_;
    for (size_t at = next(gap); slots_[at].tag != 0; at = next(at)) {
      const size_t wanted = home(slots_[at].granule);
      const size_t mask = slots_.size() - 1;
      if (((at - wanted) & mask) >= ((at - gap) & mask)) {
        slots_[gap] = slots_[at];
        gap = at;
      }
    }
    slots_[gap] = Slot{};
  }

  void grow() {
    std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
    for (const Slot& slot : old) {
      if (slot.tag == 0) continue;
      size_t at = home(slot.granule);
      while (slots_[at].tag != 0) at = next(at);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;  // A power of two of them.
  size_t num_entries_ = 0;
};

}  // namespace tandem::store
