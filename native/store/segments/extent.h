// Objects in a segment: where their parts lie, and how they become ones that survive their host.
// The formats are docs/design/store/store_formats.md; layout.py has the same geometry for columns.
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
// All bits, so that one that flips leaves it told from 0, which is no object.
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

// Borrowed memory of a segment.
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

// What of the objects is still to be written.
enum class Missing { kNothing, kTables, kValues };

// Makes all of them objects that survive, or none: table and value if they are missing, then the
// header, then the mark. `blob` has what is missing, one after the other; tables that do not fit
// their checksum, or values, are refused. With no value missing the writer has it in place.
// Errors: kConfig (leaves the segment, a field beyond its bits), kConflict (other objects begin
// there), kCorruption (the blob's length, a checksum).
Status seal_objects(const SegmentMemory& segment, const std::vector<Object>& objects,
                    Missing missing, std::string_view blob);

}  // namespace tandem::store
