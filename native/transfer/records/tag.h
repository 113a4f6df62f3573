// Keyed tags: who does not hold the key can make none, and cannot alter bytes under one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "transfer/wire/sha256.h"

namespace tandem::transfer {

inline constexpr size_t kTagBytes = 16;

// On the wire: of the kinds that a process has, bit `1 << kind` is set. Values do not change.
enum class TagKind : uint8_t { kNone = 0, kHmac = 1, kGmac = 2 };

constexpr uint8_t tag_bit(TagKind kind) { return static_cast<uint8_t>(1u << static_cast<int>(kind)); }
std::string_view tag_name(TagKind kind);  // "", "hmac", "gmac".
// The kinds of this process. HMAC-SHA256 is ours; GMAC needs a libcrypto that passes its vector.
uint8_t available_tags();
// The fastest of several kinds; kNone if there is none.
TagKind best_tag(uint8_t kinds);

// When a process asks for tags. A connection has them if one of its two ends asks.
enum class TagPolicy : uint8_t {
  kAuto,    // Unless both ends are one host, by the addresses of the connection.
  kAlways,
  kNever,
};

struct TagOptions {
  TagPolicy policy = TagPolicy::kAuto;
  uint8_t kinds = available_tags();
};

// One key. Not thread-safe.
class Tagger {
 public:
  virtual ~Tagger() = default;
  // The tag of `size` bytes under `sequence`, which is never used twice with a key. False: the
  // library failed, and there is no tag.
  virtual bool make(uint64_t sequence, const uint8_t* data, size_t size,
                    uint8_t out[kTagBytes]) = 0;

  // nullptr: this process does not have the kind, or the library failed.
  static std::unique_ptr<Tagger> create(TagKind kind, const Digest& key);
};

}  // namespace tandem::transfer
