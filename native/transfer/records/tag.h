// Keyed tags: without the key nobody can make a tag, or alter bytes under one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "transfer/wire/sha256.h"

namespace tandem::transfer {

inline constexpr size_t kTagBytes = 16;

// Values are on the wire, and do not change: in a set of kinds, bit `1 << kind` is set.
enum class TagKind : uint8_t { kNone = 0, kHmac = 1, kGmac = 2 };

constexpr uint8_t tag_bit(TagKind kind) { return static_cast<uint8_t>(1u << static_cast<int>(kind)); }
std::string_view tag_name(TagKind kind);  // "", "hmac", "gmac".
// The kinds that this process supports. HMAC-SHA256 is built in; GMAC needs a libcrypto that passes
// its test vector.
uint8_t available_tags();
// Returns the fastest of several kinds; kNone for an empty set.
TagKind best_tag(uint8_t kinds);

// Policy by which a process asks for tags. A connection has tags if at least one of its ends asks.
enum class TagPolicy : uint8_t {
  kAuto,    // Unless both ends are one host, by the addresses of the connection.
  kAlways,
  kNever,
};

struct TagOptions {
  TagPolicy policy = TagPolicy::kAuto;
  uint8_t kinds = available_tags();
};

// Makes tags with one key. Not thread-safe.
class Tagger {
 public:
  virtual ~Tagger() = default;
  // Writes the tag of `size` bytes under `sequence`, which is never used twice with a key. Returns
  // false, without a tag, if the library failed.
  virtual bool make(uint64_t sequence, const uint8_t* data, size_t size,
                    uint8_t out[kTagBytes]) = 0;

  // Returns nullptr if this process does not support the kind, or the library failed.
  static std::unique_ptr<Tagger> create(TagKind kind, const Digest& key);
};

}  // namespace tandem::transfer
