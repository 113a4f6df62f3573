#include "base/threads/idle_spin.h"
#include "transfer/wire/crc32c.h"
#include "transfer/connections/peer.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {

ClientConnection::ClientConnection(std::weak_ptr<Peer> peer, EventLoop* loop, int fd, Role role,
                                   uint32_t rail, uint32_t id,
                                   uint64_t carrier)
    : Connection(loop, EventLoop::Kind::kAnswers, fd, true),
      peer_(std::move(peer)),
      role_(role),
      rail_(rail),
      id_(id),
      carrier_(carrier),
      begin_ns_(now_ns()) {}

void ClientConnection::on_connected() {
  connected_ns_.store(now_ns(), std::memory_order_release);
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (!peer) return;
  Hello hello;
  hello.role = role_;
  // Raise the minimum version, so that an older peer is refused in the handshake instead of failing
  // at a frame that it does not know.
  asks_for_tags_ = Connection::asks_for_tags(peer->options_.tags);
  if (role_ == Role::kCalls) hello.min_version = kCallsVersion;
  if (asks_for_tags_) hello.min_version = kTagsVersion;
  hello.session = peer->session_;
  hello.connection_id = id_;
  hello.epoch = peer->epoch_.load();
  hello.nonce = random_bytes(kNonceBytes);
  hello.process = peer->options_.process;
  hello.name = peer->options_.name;
  hello_ = encode_hello(hello);
  send({.type = FrameType::kHello}, hello_);
}

Status ClientConnection::check_header(const Frame& frame) {
  if (is_handshake(frame.type) == is_ready())
    return {Code::kCorruption, "transfer.connect", "a frame out of order", ""};
  if (!carries_slice(frame)) return {};
  const auto read = reads_.find(frame.id);
  // The bytes of a dropped slice are read and discarded. A slice of another length is a protocol
  // error.
  if (frame.type == FrameType::kReadDone &&
      (read == reads_.end() || read->second.length == frame.payload_bytes))
    return {};
  return {Code::kCorruption, "transfer.read", "a slice that was not asked for", ""};
}

Connection::Sink ClientConnection::on_slice_begin(const Frame& frame) {
  const auto read = reads_.find(frame.id);
  return {read == reads_.end() ? nullptr : read->second.data};
}

void ClientConnection::on_slice_end(const Frame& frame, bool is_intact) {
  reads_.erase(frame.id);
  last_is_intact_ = is_intact;
}

void ClientConnection::send_write(uint64_t ticket, uint64_t offset, const uint8_t* data,
                                  uint64_t length, bool has_checksum) {
  Frame frame{.type = FrameType::kWrite, .id = ticket, .offset = offset, .length = length};
  if (has_checksum) {
    frame.flags = kFlagHasCrc;
    frame.payload_crc = crc32c(0, data, length);
  }
  Output output;
  output.borrowed = data;
  output.size = length;
  const MutexLock lock(mutex_);
  enqueue(std::move(output), frame);
}

void ClientConnection::send_read(uint64_t ticket, uint64_t offset, uint8_t* data, uint64_t length,
                                 bool has_checksum) {
  Frame frame{.type = FrameType::kRead, .id = ticket, .offset = offset, .length = length};
  if (has_checksum) frame.flags = kFlagHasCrc;
  const MutexLock lock(mutex_);
  if (fd_ < 0) return;
  reads_[ticket] = {data, length};
  enqueue({}, frame);
}

void ClientConnection::drop_read(uint64_t ticket) {
  const MutexLock lock(mutex_);
  reads_.erase(ticket);
  if (incoming_ && incoming_->type == FrameType::kReadDone && incoming_->id == ticket) sink_ = {};
}

bool ClientConnection::drop_write(uint64_t ticket) {
  const MutexLock lock(mutex_);
  for (auto output = outputs_.begin(); output != outputs_.end(); ++output) {
    if (output->id != ticket || output->borrowed == nullptr) continue;
    if (is_begun(*output)) return false;
    uncount(*output);
    outputs_.erase(output);
    return true;
  }
  return false;  // All of it was sent, or the connection is shut: nobody knows what the peer got.
}

Status ClientConnection::bar(Error error) {
  is_barred_.store(true, std::memory_order_release);
  return error;
}

Status ClientConnection::on_challenge(std::string_view payload, Peer& peer) {
  Result<Challenge> decoded = decode_challenge(payload);
  if (!decoded.is_ok()) return decoded.error();
  const Challenge& challenge = decoded.value();
  const Digest wanted = prove_server(peer.options_.secret, hello_, challenge);
  if (has_proved_ || !equal_in_constant_time(challenge.proof, as_view(wanted)))
    return bar({Code::kPermissionDenied, "transfer.connect",
                "the peer does not know our cluster secret", ""});
  if (challenge.version < kMinVersion || challenge.version > kMaxVersion)
    return bar({Code::kUnsupported, "transfer.connect",
                "the peer speaks versions " + std::to_string(challenge.min_version) + " to " +
                    std::to_string(challenge.max_version) + ", we " +
                    std::to_string(asks_for_tags_ ? kTagsVersion : kMinVersion) + " to " +
                    std::to_string(kMaxVersion) +
                    (asks_for_tags_ ? ": between machines frames have tags, from version " +
                                          std::to_string(kTagsVersion) + " on"
                                    : std::string()),
                ""});
  TagKind tags = TagKind::kNone;
  if (Status status = choose_tags(challenge, peer.options_.tags, &tags); !status.is_ok())
    return bar(status.error());
  uint64_t known = 0;
  if (!peer.epoch_.compare_exchange_strong(known, challenge.epoch) && known != challenge.epoch)
    return bar({Code::kPeerLost, "transfer.connect",
                "the peer was restarted: open the segment again", ""});
  has_proved_ = true;
  version_.store(challenge.version, std::memory_order_release);
  const std::string& secret = peer.options_.secret;
  const Digest proof = prove_client(secret, hello_, challenge, tags);
  send({.type = FrameType::kProof},
       encode_proof({tags, std::string(as_view(proof))}, challenge.version));
  if (tags == TagKind::kNone) return {};
  const RecordKeys keys = derive_record_keys(secret, hello_, challenge, tags);
  return begin_records(tags, keys.of_client, keys.of_server, peer.options_.refused);
}

Status ClientConnection::choose_tags(const Challenge& challenge, const TagOptions& options,
                                     TagKind* choice) const {
  if (!asks_for_tags_ && !challenge.needs_tags) return {};
  *choice = best_tag(challenge.tags & options.kinds);
  if (*choice != TagKind::kNone) return {};
  return {Code::kUnsupported, "transfer.connect",
          "this connection needs tags, and the two sides have no kind in common", "tags"};
}

Status ClientConnection::on_frame(const Frame& frame, std::string payload) {
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (!peer) return {Code::kCancelled, "transfer.connect", "the segment was closed", ""};
  const auto self = std::static_pointer_cast<ClientConnection>(shared_from_this());
  if (frame.type == FrameType::kChallenge) {
    Status status = on_challenge(payload, *peer);
    flush();
    return status;
  }
  if (frame.type == FrameType::kReady) {
    if (frame.code != 0) return bar(decode_error(frame.code, payload));
    if (!has_proved_)
      return bar({Code::kPermissionDenied, "transfer.connect", "the peer gave no proof", ""});
    is_ready_.store(true, std::memory_order_release);
    peer->on_ready(self);
    return {};
  }
  // Handle a reply without the peer's mutex, since its caller counts microseconds.
  if (frame.type == FrameType::kReply)
    return peer->calls_.on_reply(this, frame, std::move(payload));
  const bool is_intact = !carries_slice(frame) || last_is_intact_;
  return peer->on_frame(self, frame, std::move(payload), is_intact);
}

void ClientConnection::on_closed(const Error& reason) {
  const std::shared_ptr<Peer> peer = peer_.lock();
  if (peer) peer->on_closed(std::static_pointer_cast<ClientConnection>(shared_from_this()), reason);
}

}  // namespace tandem::transfer
