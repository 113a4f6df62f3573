// Goal: a reader opens only a beginning of what the writer sealed, whatever happens to the stream.
// Method: the standards' vectors for tags and keys; streams that are cut, flipped, duplicated,
// swapped, mixed with another connection's and sent back, with all fields right that need no key.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/test.h"
#include "transfer/records/record.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {
namespace {

Digest key_of(uint8_t value) {
  Digest key;
  key.fill(value);
  return key;
}

std::vector<TagKind> kinds() {
  std::vector<TagKind> found;
  for (const TagKind kind : {TagKind::kHmac, TagKind::kGmac})
    if (available_tags() & tag_bit(kind)) found.push_back(kind);
  return found;
}

std::string hex(const uint8_t* bytes, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    text.push_back("0123456789abcdef"[bytes[i] >> 4]);
    text.push_back("0123456789abcdef"[bytes[i] & 15]);
  }
  return text;
}

// Returns whole records, as one end sends them.
std::vector<std::string> seal(TagKind kind, uint8_t key, const std::vector<std::string>& texts) {
  RecordWriter writer(Tagger::create(kind, key_of(key)));
  std::vector<std::string> records;
  for (const std::string& text : texts) {
    const iovec part{const_cast<char*>(text.data()), text.size()};
    CHECK_EQ(writer.seal(&part, 1), text.size());
    records.emplace_back(reinterpret_cast<const char*>(writer.data()), writer.size());
    writer.on_sent(writer.size());
  }
  return records;
}

struct Opened {
  std::string bytes;
  bool is_refused = false;
};

// Reads a stream in parts of `step` bytes.
Opened open_all(TagKind kind, uint8_t key, const std::string& stream, size_t step) {
  RecordReader reader(Tagger::create(kind, key_of(key)));
  Opened opened;
  for (size_t at = 0;;) {
    char part[1000];
    const size_t got = reader.take(reinterpret_cast<uint8_t*>(part), sizeof part);
    opened.bytes.append(part, got);
    if (got > 0) continue;
    Result<bool> next = reader.open();
    if (!next.is_ok()) {
      CHECK(next.error().code == Code::kPermissionDenied);
      opened.is_refused = true;
      return opened;
    }
    if (next.value()) continue;
    CHECK(!reader.has_more());
    if (at == stream.size()) return opened;
    const auto [space, room] = reader.space();
    const size_t size = std::min({room, step, stream.size() - at});
    CHECK(size > 0);
    std::memcpy(space, stream.data() + at, size);
    reader.add(size);
    at += size;
  }
}

std::string join(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

TEST(hkdf_vector_of_rfc_5869) {
  std::string salt, info;
  for (char c = 0; c <= 0x0c; ++c) salt.push_back(c);
  for (int c = 0xf0; c <= 0xf9; ++c) info.push_back(static_cast<char>(c));
  const Digest key = hkdf_sha256(salt, std::string(22, '\x0b'), info);
  CHECK_EQ(hex(key.data(), key.size()),
           "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

// GMAC of "record" under nonce 00000000 || 7, computed from SP 800-38D without libcrypto's GCM.
TEST(tags_are_those_of_the_standards) {
  uint8_t tag[kTagBytes];
  const auto* text = reinterpret_cast<const uint8_t*>("record");
  const auto hmac = Tagger::create(TagKind::kHmac, key_of(1));
  CHECK(hmac->make(7, text, 6, tag));
  const Digest expected =
      hmac_sha256(std::string(32, '\1'), std::string("\7\0\0\0\0\0\0\0record", 14));
  CHECK(std::memcmp(tag, expected.data(), kTagBytes) == 0);
  if (const auto gmac = Tagger::create(TagKind::kGmac, key_of(1))) {
    CHECK(gmac->make(7, text, 6, tag));
    CHECK_EQ(hex(tag, kTagBytes), "58be7e089aed8486e3988b5f7a215ca6");
  }
}

TEST(records_come_out_as_they_went_in) {
  std::mt19937 random(1);
  std::vector<std::string> texts;
  for (const size_t size : {1, 48, 1000, 65'535, 65'536, 65'537, 262'144}) {
    texts.emplace_back(size, '\0');
    for (char& byte : texts.back()) byte = static_cast<char>(random());
  }
  for (const TagKind kind : kinds()) {
    const std::string stream = join(seal(kind, 1, texts));
    for (const size_t step : {7, 5000, 1 << 20}) {
      const Opened opened = open_all(kind, 1, stream, step);
      CHECK(!opened.is_refused && opened.bytes == join(texts));
    }
  }
}

TEST(one_turn_takes_at_most_256_kib_of_many_parts) {
  const std::string text(300'000, 'x');
  std::vector<iovec> parts;
  for (size_t at = 0; at < text.size(); at += 1000)
    parts.push_back({const_cast<char*>(text.data()) + at, 1000});
  RecordWriter writer(Tagger::create(TagKind::kHmac, key_of(1)));
  CHECK_EQ(writer.seal(parts.data(), static_cast<int>(parts.size())), size_t{256 << 10});
  const std::string stream(reinterpret_cast<const char*>(writer.data()), writer.size());
  CHECK(open_all(TagKind::kHmac, 1, stream, 1 << 20).bytes == text.substr(0, 256 << 10));
}

TEST(nothing_opens_but_the_genuine_stream_in_its_order) {
  const std::vector<std::string> texts = {"first", std::string(3000, 's'), "third", "fourth"};
  const std::string plain = join(texts);
  for (const TagKind kind : kinds()) {
    const std::vector<std::string> own = seal(kind, 1, texts);
    const std::vector<std::string> other = seal(kind, 2, texts);
    // Each attack with the number of genuine bytes that may be opened before it is noticed.
    const std::vector<std::pair<std::vector<std::string>, size_t>> attacks = {
        {{own[0], own[0], own[1]}, 5},                  // Doubled.
        {{own[1], own[0], own[2]}, 0},                  // Swapped.
        {{own[0], own[2], own[3]}, 5},                  // One left out.
        {{own[0], other[1], own[2]}, 5},                // Of another connection, at the same place.
        {{other[0], own[1]}, 0},
        {{own[0], own[1].substr(0, 100), own[2]}, 5},   // Cut in the middle.
    };
    for (const auto& [stream, limit] : attacks) {
      const Opened opened = open_all(kind, 1, join(stream), 1 << 20);
      CHECK(opened.bytes == plain.substr(0, limit));
      CHECK(opened.is_refused || stream[1].size() == 100);
    }
    // Correct the plain sequence number, as an attacker without the key can.
    std::vector<std::string> moved = {own[0], own[2]};
    moved[1][4] = 1;
    CHECK(open_all(kind, 1, join(moved), 1 << 20).is_refused);
    // A record that is cut short, with its size corrected.
    std::string shorter = own[0];
    shorter.erase(8 + 4, 1);
    shorter[0] = 4;
    CHECK(open_all(kind, 1, shorter, 1 << 20).is_refused);
    // Flip every bit of a record.
    for (size_t i = 0; i < own[0].size() * 8; ++i) {
      std::string flipped = own[0];
      flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ (1 << (i % 8)));
      const Opened opened = open_all(kind, 1, flipped + own[1], 1 << 20);
      CHECK(opened.bytes.empty());
    }
  }
}

TEST(impossible_sizes_are_refused_and_not_waited_for) {
  for (const uint32_t size : {0u, 65'537u, 0xffffffffu}) {
    std::string record(24, '\0');
    std::memcpy(record.data(), &size, 4);
    CHECK(open_all(TagKind::kHmac, 1, record, 1 << 20).is_refused);
  }
}

TEST(keys_differ_by_direction_nonce_kind_and_secret) {
  Hello hello;
  hello.session.assign(kSessionBytes, 's');
  hello.nonce.assign(kNonceBytes, 'n');
  Challenge challenge;
  challenge.version = kTagsVersion;
  challenge.nonce.assign(kNonceBytes, 'c');
  std::vector<Digest> seen;
  const auto add = [&](std::string_view secret, TagKind kind) {
    const RecordKeys keys = derive_record_keys(secret, encode_hello(hello), challenge, kind);
    seen.push_back(keys.of_client);
    seen.push_back(keys.of_server);
  };
  add("secret", TagKind::kGmac);
  add("secret", TagKind::kHmac);
  add("Secret", TagKind::kGmac);
  hello.nonce[0] = 'x';
  add("secret", TagKind::kGmac);
  challenge.nonce[31] = 'x';
  add("secret", TagKind::kGmac);
  hello.connection_id = 2;
  add("secret", TagKind::kGmac);
  for (size_t i = 0; i < seen.size(); ++i)
    for (size_t k = 0; k < i; ++k) CHECK(seen[i] != seen[k]);
}

}  // namespace
}  // namespace tandem::transfer
