// The header of an object, in segments and on disks: the only code that writes and reads this
// format, docs/design/store/store_formats.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tandem::store {

inline constexpr uint64_t kHeaderBytes = 64;
inline constexpr uint64_t kMaxKeyBytes = 0xffff;
inline constexpr uint32_t kObjectMagic = 0x4A424F54;  // "TOBJ"
// Largest version: a master's columns are signed.
inline constexpr uint64_t kMaxVersion = (uint64_t{1} << 63) - 1;

// Offsets of the fields that a reader compares without parsing the whole header.
inline constexpr size_t kKeyBytesAt = 4;
inline constexpr size_t kSizeAt = 8;
inline constexpr size_t kVersionAt = 16;
inline constexpr size_t kChecksumAt = 24;

// The fields of a header. `home` and `position` are the place it was written for: a header
// elsewhere was misplaced or copied.
struct ObjectHeader {
  std::string_view key;
  uint64_t size = 0;
  uint64_t version = 0;
  uint32_t checksum = 0;
  uint32_t soft_pin_ms = 0;
  uint8_t wanted = 0;
  bool hard_pin = false;
  uint64_t home = 0;
  uint64_t position = 0;
};

// Writes header and key: kHeaderBytes + key.size() bytes. REQUIRES: key.size() <= kMaxKeyBytes.
void write_header(uint8_t* out, const ObjectHeader& header);

// Reads the header at the beginning of `data`; the key is a view of it. Returns nothing if the
// header is corrupt, cut off, or belongs to another place.
std::optional<ObjectHeader> read_header(const uint8_t* data, size_t size, uint64_t home,
                                        uint64_t position);

}  // namespace tandem::store
