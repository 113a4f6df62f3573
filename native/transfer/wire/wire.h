// Frames of the data connection: a header of 48 bytes, then a payload;
// docs/design/transfer/transfer_wire.md has the grammar. Numbers are little-endian. Values of enums
// are part of the wire format and must not change. Nothing here uses a socket: the fuzz target
// calls decode_* on any bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transfer/engine/fence_ledger.h"
#include "transfer/records/tag.h"
#include "transfer/wire/sha256.h"

namespace tandem::transfer {

inline constexpr uint16_t kMinVersion = 1;
inline constexpr uint16_t kMaxVersion = 5;
// The first version with calls.
inline constexpr uint16_t kCallsVersion = 2;
// The first version whose grants may name a file that is not sealed.
inline constexpr uint16_t kFilesVersion = 3;
// The first version that closes connections of other sessions on request.
inline constexpr uint16_t kDebtsVersion = 4;
// The first version whose frames may be in records with tags.
inline constexpr uint16_t kTagsVersion = 5;
inline constexpr size_t kHeaderBytes = 48;
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kSessionBytes = 16;
// Largest payload of a frame without slice data.
inline constexpr uint32_t kMaxControlBytes = 4 << 20;
// Largest payload before the peer has proved the secret, so that strangers cannot use up memory.
inline constexpr uint32_t kMaxHandshakeBytes = 512;
inline constexpr uint32_t kMaxSliceBytes = 256 << 20;
// Largest request of a call, and largest answer; larger data is moved by transfers.
inline constexpr uint32_t kMaxCallBytes = 1 << 20;
// Limits of unanswered calls, for one opened segment and for one serving engine.
inline constexpr size_t kMaxCallsInFlight = 4096;
inline constexpr size_t kMaxCallBytesInFlight = 64 << 20;

enum class FrameType : uint8_t {
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  kReady = 4,
  kWrite = 16,
  kWriteDone = 17,
  kRead = 18,
  kReadDone = 19,
  kFence = 20,
  kFenced = 21,
  kFenceDebts = 22,
  kDebtsFenced = 23,
  kDescribe = 32,
  kDescription = 33,
  kGrant = 34,
  kGranted = 35,
  kRevoke = 36,
  kRevoked = 37,
  kNotify = 38,
  kNotified = 39,
  kPing = 40,
  kPong = 41,
  kBye = 42,
  kCall = 48,
  kReply = 49,
};

enum FrameFlags : uint16_t { kFlagNone = 0, kFlagHasCrc = 1 };

struct Frame {
  FrameType type = FrameType::kPing;
  uint8_t code = 0;  // 0, or 1 + Code of an answer that refuses; the payload is the text then.
  uint16_t flags = 0;
  uint32_t payload_bytes = 0;
  uint32_t payload_crc = 0;  // Where flags has kFlagHasCrc.
  uint64_t id = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
};

void encode_header(const Frame& frame, uint8_t out[kHeaderBytes]);
// Parses a header. Errors: kCorruption (magic, checksum, unknown type, a payload too long for the
// type).
Result<Frame> decode_header(const uint8_t in[kHeaderBytes]);
// Returns the payload length that an unchecked header claims.
uint32_t peek_payload_bytes(const uint8_t in[kHeaderBytes]);

constexpr bool is_handshake(FrameType type) { return type <= FrameType::kReady; }
constexpr bool is_call(FrameType type) {
  return type == FrameType::kCall || type == FrameType::kReply;
}
// True if the payload is the bytes of a slice.
constexpr bool carries_slice(const Frame& frame) {
  return frame.type == FrameType::kWrite || (frame.type == FrameType::kReadDone && frame.code == 0);
}

// Writes payloads of several fields.
class PayloadWriter {
 public:
  void put_u8(uint8_t value) { put_number(value, 1); }
  void put_u16(uint16_t value) { put_number(value, 2); }
  void put_u32(uint32_t value) { put_number(value, 4); }
  void put_u64(uint64_t value) { put_number(value, 8); }
  void put_raw(std::string_view bytes) { bytes_.append(bytes); }
  // Writes text after its 16-bit length; at most 65,535 bytes.
  void put_text(std::string_view text);
  // Writes bytes after their 32-bit length.
  void put_bytes(std::string_view bytes);
  std::string take() { return std::move(bytes_); }

 private:
  void put_number(uint64_t value, int num_bytes);
  std::string bytes_;
};

// Reads payloads of several fields. Reading past the end returns zeros and makes is_ok() false;
// check once, after the last field.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : bytes_(bytes) {}
  uint8_t get_u8() { return static_cast<uint8_t>(get_number(1)); }
  uint16_t get_u16() { return static_cast<uint16_t>(get_number(2)); }
  uint32_t get_u32() { return static_cast<uint32_t>(get_number(4)); }
  uint64_t get_u64() { return get_number(8); }
  std::string get_raw(size_t size);
  std::string get_text() { return get_raw(get_u16()); }
  std::string get_bytes() { return get_raw(get_u32()); }
  bool is_ok() const { return is_ok_; }
  // True if exactly all bytes were read.
  bool is_done() const { return is_ok_ && bytes_.empty(); }

 private:
  uint64_t get_number(size_t num_bytes);
  std::string_view bytes_;
  bool is_ok_ = true;
};

// Identity of a process for others on its host; host_id is empty if unknown.
struct ProcessId {
  std::string host_id;  // Boot and pid namespace.
  uint32_t pid = 0;
  uint64_t start_time = 0;  // Clock ticks since boot: tells a reused pid.
};

enum class Role : uint8_t { kControl = 0, kRail = 1, kCalls = 2 };

struct Hello {
  uint16_t min_version = kMinVersion;
  uint16_t max_version = kMaxVersion;
  Role role = Role::kControl;
  std::string session;       // kSessionBytes, random, one per opened segment.
  uint32_t connection_id = 0;
  uint64_t epoch = 0;        // Of the segment that is meant; 0 = whichever answers.
  std::string nonce;         // kNonceBytes, fresh.
  ProcessId process;
  std::string name;
};

struct Challenge {
  uint16_t version = 0;  // 0 = no common one.
  uint16_t min_version = kMinVersion;
  uint16_t max_version = kMaxVersion;
  uint64_t epoch = 0;
  std::string nonce;
  std::string name;
  uint8_t tags = 0;          // Bits of the kinds of tags that the server has; from kTagsVersion on.
  bool needs_tags = false;   // It serves nothing without.
  std::string proof;  // Of the secret, over hello and this; 32 bytes.
};

// The client's answer to a challenge.
struct Proof {
  TagKind tags = TagKind::kNone;  // As the client chose among those of the challenge.
  std::string proof;              // Of the secret, over hello, challenge and choice; 32 bytes.
};

std::string encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::string_view payload);
std::string encode_debts(const std::vector<FenceDebt>& debts);
Result<std::vector<FenceDebt>> decode_debts(std::string_view payload);
std::string encode_challenge(const Challenge& challenge);
Result<Challenge> decode_challenge(std::string_view payload);
std::string encode_proof(const Proof& proof, uint16_t version);
Result<Proof> decode_proof(std::string_view payload, uint16_t version);

// The proofs of both sides. Each covers both nonces, so that it cannot be replayed; their labels
// differ, so that it cannot be reflected.
Digest prove_server(std::string_view secret, std::string_view hello, const Challenge& challenge);
Digest prove_client(std::string_view secret, std::string_view hello, const Challenge& challenge,
                    TagKind tags);

// The record keys of one connection, one for each direction. They depend on the secret and on all
// that both sides have sent, with a fresh nonce of each.
struct RecordKeys {
  Digest of_client;
  Digest of_server;
};
RecordKeys derive_record_keys(std::string_view secret, std::string_view hello,
                              const Challenge& challenge, TagKind tags);

struct BufferInfo {
  uint64_t offset = 0;
  uint64_t length = 0;
  bool can_read = false;
  bool can_write = false;
  bool is_shared = false;
  std::string name;
  std::string location;
};

struct Description {
  std::string name;
  std::vector<std::string> addresses;
  std::vector<BufferInfo> buffers;
};

std::string encode_description(const Description& description);
Result<Description> decode_description(std::string_view payload);

// The information that a peer on the same host needs for direct access to a buffer.
struct Grant {
  ProcessId process;
  uint64_t base = 0;  // Segment offset of the buffer.
  uint64_t length = 0;
  bool can_read = false;
  bool can_write = false;
  uint64_t address = 0;
  uint64_t cookie_address = 0;
  std::string cookie;  // 16 bytes that stand at cookie_address.
  // Descriptor in the peer's process of memory that can be mapped; negative if it cannot be mapped.
  int32_t fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t file_offset = 0;  // Of the buffer's first byte.
  bool is_sealed = false;    // Nobody can shorten the file, and the buffer is all of it.
};

// Encodes a grant. Peers of an older version are told nothing of files that are not sealed.
std::string encode_grant(const Grant& grant, uint16_t version);
Result<Grant> decode_grant(std::string_view payload, uint16_t version);

// Encodes the parts of an error that cross the wire: where and what.
std::string encode_error(const Error& error);
Error decode_error(uint8_t code, std::string_view payload);
constexpr uint8_t wire_code(Code code) { return static_cast<uint8_t>(1 + static_cast<int>(code)); }

}  // namespace tandem::transfer
