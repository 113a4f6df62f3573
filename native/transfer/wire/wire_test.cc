// Goal: frames mean the same at both ends, and other input is refused without harm. Method: the
// standards' vectors, round trips, and seeded mutation of valid bytes.
#include <cstring>
#include <random>
#include <string>

#include "base/test.h"
#include "transfer/wire/crc32c.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text.push_back("0123456789abcdef"[byte >> 4]);
    text.push_back("0123456789abcdef"[byte & 15]);
  }
  return text;
}

Hello make_hello() {
  Hello hello;
  hello.session.assign(kSessionBytes, 's');
  hello.nonce.assign(kNonceBytes, 'n');
  hello.process = {"host", 7, 9};
  hello.name = "client";
  return hello;
}

TEST(sha256_vectors) {
  CHECK_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

// The vectors above are computed by the processor's SHA instructions if it has them.
TEST(sha256_without_instructions_gives_the_same) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::string block(64, '\0');
    for (char& byte : block) byte = static_cast<char>(random());
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t padding[64] = {0x80};
    padding[62] = 2;  // 512 bits.
    sha256_compress_portable(state, reinterpret_cast<const uint8_t*>(block.data()));
    sha256_compress_portable(state, padding);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i)
      digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
    CHECK_EQ(hex(digest), hex(sha256(block)));
  }
}

TEST(hmac_vectors_of_rfc_4231) {
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                           "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(crc32c_vectors) {
  const std::string zeros(32, '\0');
  CHECK_EQ(crc32c(0, zeros.data(), 32), 0x8a9136aau);
  CHECK_EQ(crc32c(0, "123456789", 9), 0xe3069283u);
  std::mt19937 random(1);
  std::string data(1000, '\0');
  for (char& byte : data) byte = static_cast<char>(random());
  for (size_t size = 0; size < data.size(); size += 37)
    CHECK_EQ(crc32c(0, data.data(), size), crc32c_portable(0, data.data(), size));
  // Inputs of several kilobytes use carry-less products.
  std::string longer(9000, '\0');
  for (char& byte : longer) byte = static_cast<char>(random());
  for (int round = 0; round < 300; ++round) {
    const size_t begin = random() % 100, size = random() % (longer.size() - begin);
    const uint32_t before = static_cast<uint32_t>(random());
    CHECK_EQ(crc32c(before, longer.data() + begin, size),
             crc32c_portable(before, longer.data() + begin, size));
  }
  CHECK_EQ(crc32c(crc32c(0, data.data(), 100), data.data() + 100, 900),
           crc32c(0, data.data(), 1000));
}

TEST(header_round_trip_and_refusals) {
  Frame frame{FrameType::kWrite, 0, kFlagHasCrc, 4096, 0x1234, 77, uint64_t{1} << 40, 4096};
  uint8_t bytes[kHeaderBytes];
  encode_header(frame, bytes);
  Result<Frame> decoded = decode_header(bytes);
  CHECK(decoded.is_ok());
  CHECK_EQ(decoded.value().id, 77u);
  CHECK_EQ(decoded.value().offset, uint64_t{1} << 40);
  for (size_t i = 0; i < kHeaderBytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<uint8_t>(1 << bit);
      CHECK(!decode_header(bytes).is_ok());
      bytes[i] ^= static_cast<uint8_t>(1 << bit);
    }
  }
  frame.payload_bytes = kMaxSliceBytes + 1;
  encode_header(frame, bytes);
  CHECK(!decode_header(bytes).is_ok());
  for (const FrameType type : {FrameType::kCall, FrameType::kReply}) {
    frame.type = type;
    frame.payload_bytes = kMaxCallBytes;
    encode_header(frame, bytes);
    CHECK(decode_header(bytes).is_ok());
    frame.payload_bytes = kMaxCallBytes + 1;
    encode_header(frame, bytes);
    CHECK(!decode_header(bytes).is_ok());
  }
  frame.type = FrameType::kHello;
  frame.payload_bytes = kMaxHandshakeBytes + 1;
  encode_header(frame, bytes);
  CHECK(!decode_header(bytes).is_ok());
}

TEST(payloads_round_trip) {
  const Hello hello = decode_hello(encode_hello(make_hello())).value();
  CHECK_EQ(hello.name, "client");
  CHECK_EQ(hello.process.start_time, 9u);
  Description description;
  description.name = "segment";
  description.addresses = {"127.0.0.1:1", "[::1]:2"};
  description.buffers = {{1 << 20, 100, true, false, true, "kv", "cpu:0"}};
  const Description back = decode_description(encode_description(description)).value();
  CHECK_EQ(back.addresses[1], "[::1]:2");
  CHECK(back.buffers[0].can_read && !back.buffers[0].can_write && back.buffers[0].is_shared);
  Grant grant;
  grant.base = 5;
  grant.length = 6;
  grant.cookie = "0123456789abcdef";
  CHECK_EQ(decode_grant(encode_grant(grant, kMinVersion), kMinVersion).value().fd, -1);
  grant.fd = 3;
  grant.inode = 4;
  grant.file_offset = 4096;
  const Grant file = decode_grant(encode_grant(grant, kFilesVersion), kFilesVersion).value();
  CHECK(file.fd == 3 && file.inode == 4 && file.file_offset == 4096 && !file.is_sealed);
  // An older peer would take an unsealed file for sealed memory, so that it is told of none.
  const Grant old = decode_grant(encode_grant(grant, kCallsVersion), kCallsVersion).value();
  CHECK(old.fd == -1 && old.inode == 0 && old.file_offset == 0);
  grant.is_sealed = true;
  CHECK_EQ(decode_grant(encode_grant(grant, kCallsVersion), kCallsVersion).value().fd, 3);
  grant.file_offset = UINT64_MAX;
  CHECK(!decode_grant(encode_grant(grant, kFilesVersion), kFilesVersion).is_ok());
  const Error error = decode_error(wire_code(Code::kCapacity),
                                   encode_error({Code::kCapacity, "a.b", "full", ""}));
  CHECK(error.code == Code::kCapacity && error.where == "a.b" && error.what == "full");
}

TEST(who_speaks_of_tags_and_who_does_not) {
  Challenge challenge;
  challenge.nonce.assign(kNonceBytes, 'c');
  challenge.proof.assign(32, 'p');
  challenge.tags = available_tags();
  challenge.needs_tags = true;
  challenge.version = kTagsVersion - 1;
  CHECK(!decode_challenge(encode_challenge(challenge)).value().needs_tags);
  challenge.version = kTagsVersion;
  const Challenge back = decode_challenge(encode_challenge(challenge)).value();
  CHECK(back.needs_tags && back.tags == available_tags());
  const Proof proof{TagKind::kGmac, std::string(32, 'p')};
  CHECK(decode_proof(encode_proof(proof, kTagsVersion), kTagsVersion).value().tags ==
        TagKind::kGmac);
  CHECK_EQ(encode_proof(proof, kTagsVersion - 1).size(), size_t{32});
  CHECK(!decode_proof("\3" + proof.proof, kTagsVersion).is_ok());
  CHECK(!decode_proof(proof.proof, kTagsVersion).is_ok());
}

TEST(payload_decoders_survive_any_bytes) {
  std::mt19937 random(2);
  Description description;
  description.addresses = {"127.0.0.1:1"};
  description.buffers = {{1, 2, true, true, true, "a", "b"}};
  const std::string valid[] = {encode_hello(make_hello()), encode_description(description),
                               encode_grant(Grant{}, kMaxVersion), encode_challenge(Challenge{})};
  int num_refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = valid[random() % 4];
    for (unsigned i = random() % 4; i > 0; --i)
      if (!bytes.empty()) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 2) bytes.resize(random() % (bytes.size() + 8));
    num_refused += !decode_hello(bytes).is_ok();
    num_refused += !decode_description(bytes).is_ok();
    num_refused += !decode_grant(bytes, kMaxVersion).is_ok();
    num_refused += !decode_challenge(bytes).is_ok();
    decode_error(static_cast<uint8_t>(random()), bytes);
  }
  CHECK(num_refused > 40'000);
}

TEST(proofs_cover_secret_nonces_and_side) {
  const std::string hello = encode_hello(make_hello());
  Challenge challenge;
  challenge.nonce.assign(kNonceBytes, 'c');
  const Digest server = prove_server("secret", hello, challenge);
  CHECK(server != prove_client("secret", hello, challenge, TagKind::kNone));
  challenge.version = kTagsVersion;
  CHECK(prove_client("secret", hello, challenge, TagKind::kHmac) !=
        prove_client("secret", hello, challenge, TagKind::kGmac));
  challenge.version = 0;
  CHECK(server != prove_server("Secret", hello, challenge));
  Hello other = make_hello();
  other.nonce[0] = 'x';
  CHECK(server != prove_server("secret", encode_hello(other), challenge));
  challenge.nonce[31] = 'x';
  CHECK(server != prove_server("secret", hello, challenge));
  CHECK(equal_in_constant_time("ab", "ab") && !equal_in_constant_time("ab", "ac") &&
        !equal_in_constant_time("ab", "abc"));
}

}  // namespace
}  // namespace tandem::transfer
