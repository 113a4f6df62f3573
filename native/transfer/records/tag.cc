#include "transfer/records/tag.h"

#include <cstring>

#include "transfer/records/gmac.h"

namespace tandem::transfer {
namespace {

// HMAC-SHA256 of the sequence number and the bytes, cut to 16 bytes (RFC 2104, section 5).
class HmacTagger : public Tagger {
 public:
  explicit HmacTagger(const Digest& key) : key_(as_view(key)) {}

  bool make(uint64_t sequence, const uint8_t* data, size_t size,
            uint8_t out[kTagBytes]) override {
    char number[8];
    for (int i = 0; i < 8; ++i) number[i] = static_cast<char>(sequence >> (8 * i));
    const Digest digest = key_.sign(
        {{number, sizeof number}, {reinterpret_cast<const char*>(data), size}});
    std::memcpy(out, digest.data(), kTagBytes);
    return true;
  }

 private:
  const HmacSha256 key_;
};

}  // namespace

std::string_view tag_name(TagKind kind) {
  switch (kind) {
    case TagKind::kHmac:
      return "hmac";
    case TagKind::kGmac:
      return "gmac";
    default:
      return "";
  }
}

uint8_t available_tags() {
  return static_cast<uint8_t>(tag_bit(TagKind::kHmac) |
                              (has_gmac() ? tag_bit(TagKind::kGmac) : 0));
}

TagKind best_tag(uint8_t kinds) {
  for (const TagKind kind : {TagKind::kGmac, TagKind::kHmac})
    if (kinds & tag_bit(kind)) return kind;
  return TagKind::kNone;
}

std::unique_ptr<Tagger> Tagger::create(TagKind kind, const Digest& key) {
  if (kind == TagKind::kHmac) return std::make_unique<HmacTagger>(key);
  return kind == TagKind::kGmac ? make_gmac(key) : nullptr;
}

}  // namespace tandem::transfer
