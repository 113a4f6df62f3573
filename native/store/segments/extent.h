// Objects in a segment: the layout of their parts, and the seal after which they survive a restart
// of their host. The format is docs/design/store/store_formats.md; layout.py has the same geometry
// for columns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "store/segments/object_header.h"

namespace tandem::store {

inline constexpr uint64_t kGranuleBytes = 512;
inline constexpr uint64_t kChunkBytes = 64u << 10;
inline constexpr uint64_t kMaxValueBytes = uint64_t{1} << 40;
// Mark byte of a granule at which an object begins. It differs from 0 in all bits, so that one
// flipped bit does not hide the object.
inline constexpr uint8_t kMark = 0xff;

constexpr uint64_t count_chunks(uint64_t value_bytes) {
  return (value_bytes + kChunkBytes - 1) / kChunkBytes;
}
constexpr uint64_t table_offset(uint64_t key_bytes) {
  return kHeaderBytes + ((key_bytes + 63) & ~uint64_t{63});
}
constexpr uint64_t value_offset(uint64_t key_bytes, uint64_t value_bytes) {
  return table_offset(key_bytes) + ((4 * count_chunks(value_bytes) + 63) & ~uint64_t{63});
}
// REQUIRES: value_bytes <= kMaxValueBytes.
constexpr uint64_t extent_bytes(uint64_t key_bytes, uint64_t value_bytes) {
  return (value_offset(key_bytes, value_bytes) + value_bytes + kGranuleBytes - 1) &
         ~(kGranuleBytes - 1);
}

// The memory of a segment, borrowed.
struct SegmentMemory {
  uint8_t* marks = nullptr;  // One a granule: kMark where an object begins.
  uint64_t num_marks = 0;
  uint8_t* data = nullptr;
  uint64_t usable_bytes = 0;
  uint64_t home = 0;  // Of its headers.
};

struct Object {
  std::string_view key;
  uint64_t offset = 0;
  uint64_t size = 0;
  uint64_t version = 0;
  uint64_t checksum = 0;
  uint64_t wanted = 0;
  uint64_t soft_pin_ms = 0;
  bool hard_pin = false;
};

// The parts of objects that the seal must still write.
enum class Missing { kNothing, kTables, kValues };

// Seals all objects, or none: writes missing tables and values, then the header, then the mark.
// `blob` has the missing parts, concatenated. A table or value that does not match its checksum is
// refused. Values that are not missing were written by their client. Errors: kConfig (an extent
// leaves the segment, a field is out of range), kConflict (other objects begin there), kCorruption
// (length of the blob, a checksum).
Status seal_objects(const SegmentMemory& segment, const std::vector<Object>& objects,
                    Missing missing, std::string_view blob);

}  // namespace tandem::store
