#include "transfer/wire/wire.h"

#include <algorithm>
#include <cstring>

#include "transfer/wire/crc32c.h"

namespace tandem::transfer {
namespace {

constexpr uint32_t kMagic = 0x31584e54;  // "TNX1"

void store(uint8_t* out, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint64_t load(const uint8_t* in, int num_bytes) {
  uint64_t value = 0;
  for (int i = 0; i < num_bytes; ++i) value |= uint64_t{in[i]} << (8 * i);
  return value;
}

Error corrupt(const std::string& what) {
  return {Code::kCorruption, "transfer.decode", what + ": the peer speaks something else", ""};
}

bool is_known(uint8_t type) {
  return (type >= 1 && type <= 4) || (type >= 16 && type <= 23) || (type >= 32 && type <= 42) ||
         type == 48 || type == 49;
}

uint32_t max_payload(const Frame& frame) {
  if (carries_slice(frame)) return kMaxSliceBytes;
  if (is_call(frame.type)) return kMaxCallBytes;
  return is_handshake(frame.type) ? kMaxHandshakeBytes : kMaxControlBytes;
}

std::string prove_input(std::string_view label, std::string_view hello,
                        const Challenge& challenge) {
  Challenge bare = challenge;
  bare.proof.assign(32, '\0');
  std::string input(label);
  input.append(as_view(sha256(hello)));
  input.append(as_view(sha256(encode_challenge(bare))));
  return input;
}

// Adds the choice of tags to the input of the proof, in versions that have tags.
std::string with_choice(std::string input, const Challenge& challenge, TagKind tags) {
  if (challenge.version >= kTagsVersion) input.push_back(static_cast<char>(tags));
  return input;
}

void put_process(PayloadWriter& out, const ProcessId& process) {
  out.put_text(process.host_id);
  out.put_u32(process.pid);
  out.put_u64(process.start_time);
}

ProcessId get_process(PayloadReader& in) {
  ProcessId process;
  process.host_id = in.get_text();
  process.pid = in.get_u32();
  process.start_time = in.get_u64();
  return process;
}

}  // namespace

void encode_header(const Frame& frame, uint8_t out[kHeaderBytes]) {
  store(out, kMagic, 4);
  out[4] = static_cast<uint8_t>(frame.type);
  out[5] = frame.code;
  store(out + 6, frame.flags, 2);
  store(out + 8, frame.payload_bytes, 4);
  store(out + 12, frame.payload_crc, 4);
  store(out + 16, frame.id, 8);
  store(out + 24, frame.offset, 8);
  store(out + 32, frame.length, 8);
  store(out + 40, 0, 4);
  store(out + 44, crc32c(0, out, 44), 4);
}

uint32_t peek_payload_bytes(const uint8_t in[kHeaderBytes]) {
  return static_cast<uint32_t>(load(in + 8, 4));
}

Result<Frame> decode_header(const uint8_t in[kHeaderBytes]) {
  if (load(in, 4) != kMagic) return corrupt("a header without our magic");
  if (load(in + 44, 4) != crc32c(0, in, 44)) return corrupt("a header with a wrong check sum");
  if (!is_known(in[4])) return corrupt("a frame of unknown type " + std::to_string(in[4]));
  Frame frame;
  frame.type = static_cast<FrameType>(in[4]);
  frame.code = in[5];
  frame.flags = static_cast<uint16_t>(load(in + 6, 2));
  frame.payload_bytes = static_cast<uint32_t>(load(in + 8, 4));
  frame.payload_crc = static_cast<uint32_t>(load(in + 12, 4));
  frame.id = load(in + 16, 8);
  frame.offset = load(in + 24, 8);
  frame.length = load(in + 32, 8);
  if (frame.payload_bytes > max_payload(frame))
    return corrupt("a payload of " + std::to_string(frame.payload_bytes) + " bytes");
  if (frame.code > kCodeNames.size()) return corrupt("an unknown error code");
  return frame;
}

void PayloadWriter::put_number(uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

void PayloadWriter::put_text(std::string_view text) {
  const std::string_view cut = text.substr(0, 65535);
  put_u16(static_cast<uint16_t>(cut.size()));
  put_raw(cut);
}

void PayloadWriter::put_bytes(std::string_view bytes) {
  put_u32(static_cast<uint32_t>(bytes.size()));
  put_raw(bytes);
}

uint64_t PayloadReader::get_number(size_t num_bytes) {
  if (bytes_.size() < num_bytes) {
    is_ok_ = false;
    bytes_ = {};
    return 0;
  }
  const uint64_t value =
      load(reinterpret_cast<const uint8_t*>(bytes_.data()), static_cast<int>(num_bytes));
  bytes_.remove_prefix(num_bytes);
  return value;
}

std::string PayloadReader::get_raw(size_t size) {
  if (bytes_.size() < size) {
    is_ok_ = false;
    bytes_ = {};
    return {};
  }
  std::string raw(bytes_.substr(0, size));
  bytes_.remove_prefix(size);
  return raw;
}

std::string encode_hello(const Hello& hello) {
  PayloadWriter out;
  out.put_u16(hello.min_version);
  out.put_u16(hello.max_version);
  out.put_u8(static_cast<uint8_t>(hello.role));
  out.put_raw(hello.session);
  out.put_u32(hello.connection_id);
  out.put_u64(hello.epoch);
  out.put_raw(hello.nonce);
  put_process(out, hello.process);
  out.put_text(hello.name);
  return out.take();
}

Result<Hello> decode_hello(std::string_view payload) {
  PayloadReader in(payload);
  Hello hello;
  hello.min_version = in.get_u16();
  hello.max_version = in.get_u16();
  const uint8_t role = in.get_u8();
  hello.role = static_cast<Role>(role);
  hello.session = in.get_raw(kSessionBytes);
  hello.connection_id = in.get_u32();
  hello.epoch = in.get_u64();
  hello.nonce = in.get_raw(kNonceBytes);
  hello.process = get_process(in);
  hello.name = in.get_text();
  if (!in.is_done() || role > 2) return corrupt("a malformed hello");
  return hello;
}

std::string encode_debts(const std::vector<FenceDebt>& debts) {
  PayloadWriter out;
  for (const FenceDebt& debt : debts) {
    out.put_raw(debt.session);
    out.put_u32(debt.connection);
  }
  return out.take();
}

Result<std::vector<FenceDebt>> decode_debts(std::string_view payload) {
  constexpr size_t kDebtBytes = kSessionBytes + 4;
  if (payload.size() % kDebtBytes != 0) return corrupt("a malformed fence");
  PayloadReader in(payload);
  std::vector<FenceDebt> debts(payload.size() / kDebtBytes);
  for (FenceDebt& debt : debts) {
    debt.session = in.get_raw(kSessionBytes);
    debt.connection = in.get_u32();
  }
  return debts;
}

std::string encode_challenge(const Challenge& challenge) {
  PayloadWriter out;
  out.put_u16(challenge.version);
  out.put_u16(challenge.min_version);
  out.put_u16(challenge.max_version);
  out.put_u64(challenge.epoch);
  out.put_raw(challenge.nonce);
  out.put_text(challenge.name);
  if (challenge.version >= kTagsVersion) {
    out.put_u8(challenge.tags);
    out.put_u8(challenge.needs_tags);
  }
  out.put_raw(challenge.proof);
  return out.take();
}

Result<Challenge> decode_challenge(std::string_view payload) {
  PayloadReader in(payload);
  Challenge challenge;
  challenge.version = in.get_u16();
  challenge.min_version = in.get_u16();
  challenge.max_version = in.get_u16();
  challenge.epoch = in.get_u64();
  challenge.nonce = in.get_raw(kNonceBytes);
  challenge.name = in.get_text();
  uint8_t needs_tags = 0;
  if (challenge.version >= kTagsVersion) {
    challenge.tags = in.get_u8();
    needs_tags = in.get_u8();
    challenge.needs_tags = needs_tags == 1;
  }
  challenge.proof = in.get_raw(32);
  if (!in.is_done() || needs_tags > 1) return corrupt("a malformed challenge");
  return challenge;
}

std::string encode_proof(const Proof& proof, uint16_t version) {
  PayloadWriter out;
  if (version >= kTagsVersion) out.put_u8(static_cast<uint8_t>(proof.tags));
  out.put_raw(proof.proof);
  return out.take();
}

Result<Proof> decode_proof(std::string_view payload, uint16_t version) {
  PayloadReader in(payload);
  Proof proof;
  const uint8_t tags = version >= kTagsVersion ? in.get_u8() : 0;
  proof.tags = static_cast<TagKind>(tags);
  proof.proof = in.get_raw(32);
  if (!in.is_done() || tags > static_cast<uint8_t>(TagKind::kGmac))
    return corrupt("a malformed proof");
  return proof;
}

Digest prove_server(std::string_view secret, std::string_view hello, const Challenge& challenge) {
  return hmac_sha256(secret, prove_input("tandem transfer v1 server", hello, challenge));
}

Digest prove_client(std::string_view secret, std::string_view hello, const Challenge& challenge,
                    TagKind tags) {
  return hmac_sha256(secret, with_choice(prove_input("tandem transfer v1 client", hello, challenge),
                                         challenge, tags));
}

RecordKeys derive_record_keys(std::string_view secret, std::string_view hello,
                              const Challenge& challenge, TagKind tags) {
  const auto derive = [&](std::string_view label) {
    return hkdf_sha256("tandem transfer", secret,
                       with_choice(prove_input(label, hello, challenge), challenge, tags));
  };
  return {derive("tandem transfer v5 records of the client"),
          derive("tandem transfer v5 records of the server")};
}

std::string encode_description(const Description& description) {
  PayloadWriter out;
  out.put_text(description.name);
  out.put_u16(static_cast<uint16_t>(description.addresses.size()));
  for (const std::string& address : description.addresses) out.put_text(address);
  out.put_u32(static_cast<uint32_t>(description.buffers.size()));
  for (const BufferInfo& buffer : description.buffers) {
    out.put_u64(buffer.offset);
    out.put_u64(buffer.length);
    out.put_u8(static_cast<uint8_t>(buffer.can_read | buffer.can_write << 1 |
                                    buffer.is_shared << 2));
    out.put_text(buffer.name);
    out.put_text(buffer.location);
  }
  return out.take();
}

Result<Description> decode_description(std::string_view payload) {
  PayloadReader in(payload);
  Description description;
  description.name = in.get_text();
  const uint16_t num_addresses = in.get_u16();
  for (uint16_t i = 0; i < num_addresses && in.is_ok(); ++i)
    description.addresses.push_back(in.get_text());
  const uint32_t num_buffers = in.get_u32();
  // Do not reserve memory by the count, which is the peer's claim; the payload's length limits the
  // loop.
  for (uint32_t i = 0; i < num_buffers && in.is_ok(); ++i) {
    BufferInfo buffer;
    buffer.offset = in.get_u64();
    buffer.length = in.get_u64();
    const uint8_t bits = in.get_u8();
    buffer.can_read = bits & 1;
    buffer.can_write = bits & 2;
    buffer.is_shared = bits & 4;
    buffer.name = in.get_text();
    buffer.location = in.get_text();
    description.buffers.push_back(std::move(buffer));
  }
  if (!in.is_done()) return corrupt("a malformed description");
  return description;
}

std::string encode_grant(const Grant& grant, uint16_t version) {
  const bool is_told = version >= kFilesVersion || grant.is_sealed;
  PayloadWriter out;
  put_process(out, grant.process);
  out.put_u64(grant.base);
  out.put_u64(grant.length);
  out.put_u8(static_cast<uint8_t>(grant.can_read | grant.can_write << 1));
  out.put_u64(grant.address);
  out.put_u64(grant.cookie_address);
  out.put_text(grant.cookie);
  out.put_u32(static_cast<uint32_t>(is_told ? grant.fd : -1));
  out.put_u64(is_told ? grant.device : 0);
  out.put_u64(is_told ? grant.inode : 0);
  if (version >= kFilesVersion) {
    out.put_u64(grant.file_offset);
    out.put_u8(grant.is_sealed);
  }
  return out.take();
}

Result<Grant> decode_grant(std::string_view payload, uint16_t version) {
  PayloadReader in(payload);
  Grant grant;
  grant.process = get_process(in);
  grant.base = in.get_u64();
  grant.length = in.get_u64();
  const uint8_t bits = in.get_u8();
  grant.can_read = bits & 1;
  grant.can_write = bits & 2;
  grant.address = in.get_u64();
  grant.cookie_address = in.get_u64();
  grant.cookie = in.get_text();
  grant.fd = static_cast<int32_t>(in.get_u32());
  grant.device = in.get_u64();
  grant.inode = in.get_u64();
  grant.is_sealed = grant.fd >= 0;
  if (version >= kFilesVersion) {
    grant.file_offset = in.get_u64();
    grant.is_sealed = in.get_u8() & 1;
  }
  if (!in.is_done() || grant.base + grant.length < grant.base ||
      grant.file_offset + grant.length < grant.file_offset)
    return corrupt("a malformed grant");
  return grant;
}

std::string encode_error(const Error& error) {
  PayloadWriter out;
  out.put_text(error.where);
  out.put_text(error.what);
  return out.take();
}

Error decode_error(uint8_t code, std::string_view payload) {
  PayloadReader in(payload);
  std::string where = in.get_text();
  std::string what = in.get_text();
  const bool is_known_code = code >= 1 && code <= kCodeNames.size();
  if (!in.is_done() || !is_known_code)
    return {Code::kCorruption, "transfer.decode", "a malformed error from the peer", ""};
  return {static_cast<Code>(code - 1), std::move(where), std::move(what), ""};
}

}  // namespace tandem::transfer
