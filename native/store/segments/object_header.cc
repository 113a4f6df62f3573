#include "store/segments/object_header.h"

#include <cstring>

#include "transfer/wire/crc32c.h"

namespace tandem::store {
namespace {

constexpr uint8_t kHardPin = 1;

// The header's layout in the file.
struct [[gnu::packed]] Layout {
  uint32_t magic;
  uint16_t key_bytes;
  uint8_t wanted;
  uint8_t flags;
  uint64_t size;
  uint64_t version;
  uint32_t checksum;
  uint32_t soft_pin_ms;
  uint64_t home;
  uint64_t position;
  uint8_t zero[12];
  uint32_t crc;
};
static_assert(sizeof(Layout) == kHeaderBytes);
static_assert(offsetof(Layout, key_bytes) == kKeyBytesAt && offsetof(Layout, size) == kSizeAt &&
              offsetof(Layout, version) == kVersionAt && offsetof(Layout, checksum) == kChecksumAt);

uint32_t checksum(const Layout& layout, const void* key) {
  const uint32_t crc = transfer::crc32c(0, &layout, offsetof(Layout, crc));
  return transfer::crc32c(crc, key, layout.key_bytes);
}

}  // namespace

void write_header(uint8_t* out, const ObjectHeader& header) {
  Layout layout{};
  layout.magic = kObjectMagic;
  layout.key_bytes = static_cast<uint16_t>(header.key.size());
  layout.wanted = header.wanted;
  layout.flags = header.hard_pin ? kHardPin : 0;
  layout.size = header.size;
  layout.version = header.version;
  layout.checksum = header.checksum;
  layout.soft_pin_ms = header.soft_pin_ms;
  layout.home = header.home;
  layout.position = header.position;
  layout.crc = checksum(layout, header.key.data());
  std::memcpy(out, &layout, sizeof(layout));
  std::memcpy(out + sizeof(layout), header.key.data(), header.key.size());
}

std::optional<ObjectHeader> read_header(const uint8_t* data, size_t size, uint64_t home,
                                        uint64_t position) {
  Layout layout;
  if (size < sizeof(layout)) return std::nullopt;
  std::memcpy(&layout, data, sizeof(layout));
  const uint8_t* const key = data + sizeof(layout);
  if (layout.magic != kObjectMagic || layout.key_bytes > size - sizeof(layout) ||
      layout.crc != checksum(layout, key))
    return std::nullopt;
  // The checksum is right, but the header belongs to another place, or has values that no writer
  // uses.
  if (layout.home != home || layout.position != position || layout.flags > kHardPin ||
      layout.version > kMaxVersion)
    return std::nullopt;
  return ObjectHeader{.key = {reinterpret_cast<const char*>(key), layout.key_bytes},
                      .size = layout.size,
                      .version = layout.version,
                      .checksum = layout.checksum,
                      .soft_pin_ms = layout.soft_pin_ms,
                      .wanted = layout.wanted,
                      .hard_pin = layout.flags == kHardPin,
                      .home = home,
                      .position = position};
}

}  // namespace tandem::store
