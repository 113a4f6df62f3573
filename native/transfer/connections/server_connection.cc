#include <algorithm>

#include "base/threads/idle_spin.h"
#include "transfer/wire/crc32c.h"
#include "transfer/memory/process_id.h"
#include "transfer/connections/server.h"

namespace tandem::transfer {

ServerConnection::ServerConnection(std::shared_ptr<Server> server, EventLoop* loop, int fd)
    : Connection(loop, EventLoop::Kind::kRequests, fd, false),
      server_(std::move(server)),
      begin_ns_(now_ns()) {}

Status ServerConnection::check_header(const Frame& frame) {
  const bool is_slice = frame.type == FrameType::kWrite || frame.type == FrameType::kRead;
  // The sender numbers its slices with rising tickets. A slice whose ticket is not above the last
  // one was repeated or arrived late, and could overwrite newer bytes.
  if (is_slice && is_ready()) {
    if (frame.id <= last_slice_id_)
      return {Code::kCorruption, "transfer.serve", "slices out of order", ""};
    last_slice_id_ = frame.id;
  }
  if (frame.type == FrameType::kCall && is_ready()) {
    if (hello_.role != Role::kCalls || frame.id <= last_call_id_)
      return {Code::kCorruption, "transfer.serve", "a call out of order", ""};
    last_call_id_ = frame.id;
  }
  if (is_ready() != is_handshake(frame.type)) return {};
  return {Code::kPermissionDenied, "transfer.accept",
          is_ready() ? "a second handshake" : "a frame before the proof of the secret", ""};
}

Connection::Sink ServerConnection::on_slice_begin(const Frame& frame) {
  write_status_ = {};
  Result<Registry::Pin> pin = server_->registry_->pin(frame.offset, frame.payload_bytes,
                                                      Registry::Access::kRemoteWrite);
  if (!pin.is_ok() || frame.type != FrameType::kWrite) {
    write_status_ = pin.is_ok() ? Status(Code::kCorruption, "transfer.write", "no write", "")
                                : Status(pin.error());
    return {};
  }
  write_pin_ = std::move(pin.value());
  const Registry::Entry& entry = write_pin_.entry();
  return {entry.spec.data + (frame.offset - entry.base)};
}

void ServerConnection::on_slice_end(const Frame&, bool is_intact) {
  write_pin_.reset();
  if (!is_intact && write_status_.is_ok())
    write_status_ = {Code::kCorruption, "transfer.write", "a slice with a wrong check sum", ""};
}

// A peer that closes a rail has given up the rail's slices, so unread input is dropped. On
// connections of other roles a good-bye may come last, so their unread input is handled.
bool ServerConnection::is_void_once_hung_up() const {
  return is_ready() && hello_.role == Role::kRail;
}

void ServerConnection::on_shut() { write_pin_.reset(); }

bool ServerConnection::drop_buffer(uint64_t base) {
  const Error gone{Code::kNotFound, "transfer.access", "the buffer was unregistered", "offset"};
  const MutexLock lock(mutex_);
  if (write_pin_ && write_pin_.entry().base == base) {
    sink_ = {};
    write_pin_.reset();
    write_status_ = gone;
  }
  for (Output& output : outputs_) {
    if (!output.pin || output.pin.entry().base != base) continue;
    if (is_begun(output)) return false;
    const Frame refusal{.type = FrameType::kReadDone, .code = wire_code(gone.code), .id = output.id};
    replace(output, refusal, encode_error(gone));
  }
  return true;
}

void ServerConnection::answer(FrameType type, const Frame& request, const Status& status) {
  Frame frame{.type = type, .id = request.id, .offset = request.offset};
  std::string payload;
  if (!status.is_ok()) {
    frame.code = wire_code(status.error().code);
    payload = encode_error(status.error());
  }
  send(frame, std::move(payload));
}

Status ServerConnection::on_frame(const Frame& frame, std::string payload) {
  switch (frame.type) {
    case FrameType::kHello:
      return on_hello(std::move(payload));
    case FrameType::kProof:
      return on_proof(payload);
    case FrameType::kWrite: {
      Status status;
      {
        const MutexLock lock(mutex_);
        status = write_status_;
      }
      answer(FrameType::kWriteDone, frame, status);
      break;
    }
    case FrameType::kRead:
      serve_read(frame);
      break;
    case FrameType::kFence: {
      PayloadReader in(payload);
      std::vector<FenceDebt> debts;
      for (size_t i = 0; i < payload.size() / 4; ++i)
        debts.push_back({hello_.session, in.get_u32()});
      // Close the connections before any later frame of this connection is read, as the fence
      // requires.
      server_->fence(debts);
      send({.type = FrameType::kFenced, .id = frame.id}, std::move(payload));
      break;
    }
    case FrameType::kFenceDebts: {
      Result<std::vector<FenceDebt>> debts = decode_debts(payload);
      if (!debts.is_ok()) return debts.error();
      server_->fence(debts.value());
      send({.type = FrameType::kDebtsFenced, .id = frame.id}, std::move(payload));
      break;
    }
    case FrameType::kCall: {
      // A call is answered by the serving thread or loop, not here.
      const Status status =
          server_->calls_->push(weak_from_this(), frame.id, hello_.name, std::move(payload));
      if (status.is_ok()) return {};
      answer(FrameType::kReply, frame, status);
      break;
    }
    default:
      if (Status status = on_control(frame, std::move(payload)); !status.is_ok()) return status;
  }
  return {};
}

void ServerConnection::serve_read(const Frame& frame) {
  Result<Registry::Pin> pin =
      frame.length > kMaxSliceBytes
          ? Error{Code::kConfig, "transfer.read", "a slice of more than 256 MiB", "length"}
          : server_->registry_->pin(frame.offset, frame.length, Registry::Access::kRemoteRead);
  if (!pin.is_ok()) return answer(FrameType::kReadDone, frame, pin.error());
  Frame reply{.type = FrameType::kReadDone, .id = frame.id};
  Output output;
  const Registry::Entry& entry = pin.value().entry();
  output.borrowed = entry.spec.data + (frame.offset - entry.base);
  output.size = frame.length;
  output.pin = std::move(pin.value());
  if (frame.flags & kFlagHasCrc) {
    reply.flags = kFlagHasCrc;
    reply.payload_crc = crc32c(0, output.borrowed, output.size);
  }
  const MutexLock lock(mutex_);
  enqueue(std::move(output), reply);
}

Status ServerConnection::on_hello(std::string payload) {
  if (!hello_payload_.empty())
    return {Code::kPermissionDenied, "transfer.accept", "a second hello", ""};
  Result<Hello> hello = decode_hello(payload);
  if (!hello.is_ok()) return hello.error();
  hello_ = hello.value();
  hello_payload_ = std::move(payload);
  const ServerOptions& options = server_->options_;
  const uint16_t version = std::min(kMaxVersion, hello_.max_version);
  challenge_.needs_tags = asks_for_tags(options.tags);
  challenge_.tags = options.tags.kinds;
  challenge_.min_version = challenge_.needs_tags ? kTagsVersion : kMinVersion;
  challenge_.version =
      version >= std::max(challenge_.min_version, hello_.min_version) ? version : 0;
  challenge_.epoch = options.epoch;
  challenge_.nonce = random_bytes(kNonceBytes);
  challenge_.name = options.name;
  const Digest proof = prove_server(options.secret, hello_payload_, challenge_);
  challenge_.proof = as_view(proof);
  send({.type = FrameType::kChallenge}, encode_challenge(challenge_));
  flush();
  return {};
}

Status ServerConnection::on_proof(std::string_view payload) {
  const ServerOptions& options = server_->options_;
  Result<Proof> decoded = decode_proof(payload, challenge_.version);
  const Proof proof = decoded.is_ok() ? decoded.value() : Proof{};
  const Digest wanted = prove_client(options.secret, hello_payload_, challenge_, proof.tags);
  if (hello_payload_.empty() || challenge_.version == 0 ||
      !equal_in_constant_time(proof.proof, as_view(wanted))) {
    // The text is the same for all causes, so that a peer without the secret learns nothing.
    const Error error{Code::kPermissionDenied, "transfer.accept",
                      "the proof of the cluster secret is wrong", ""};
    answer(FrameType::kReady, {}, error);
    flush();
    return error;
  }
  Status status;
  if (proof.tags != TagKind::kNone) {
    const RecordKeys keys =
        derive_record_keys(options.secret, hello_payload_, challenge_, proof.tags);
    status = begin_records(proof.tags, keys.of_server, keys.of_client, options.refused);
    if (!status.is_ok()) return status;
  } else if (challenge_.needs_tags) {
    return {Code::kPermissionDenied, "transfer.accept", "a proof without the tags it needs", ""};
  }
  if (hello_.epoch != 0 && hello_.epoch != options.epoch)
    status = {Code::kPeerLost, "transfer.accept",
              "the segment was restarted since it was opened: open it again", ""};
  if (status.is_ok()) {
    is_ready_.store(true, std::memory_order_release);
    status = server_->join(std::static_pointer_cast<ServerConnection>(shared_from_this()), hello_);
  }
  if (!status.is_ok()) answer(FrameType::kReady, {}, status);
  flush();
  return status;
}

Status ServerConnection::on_control(const Frame& frame, std::string payload) {
  const std::string& session = hello_.session;
  switch (frame.type) {
    case FrameType::kDescribe:
      send({.type = FrameType::kDescription, .id = frame.id},
           encode_description(server_->describe(*this)));
      return {};
    case FrameType::kGrant: {
      Result<Grant> grant = server_->grant(session, frame.offset);
      if (grant.is_ok())
        send({.type = FrameType::kGranted, .id = frame.id, .offset = frame.offset},
             encode_grant(grant.value(), challenge_.version));
      else
        answer(FrameType::kGranted, frame, grant.error());
      return {};
    }
    case FrameType::kRevoked:
      server_->on_revoked(session, frame.offset);
      return {};
    case FrameType::kNotify: {
      PayloadReader in(payload);
      Notification notification;
      notification.name = in.get_text();
      notification.payload = in.get_bytes();
      if (!in.is_done())
        return {Code::kCorruption, "transfer.notify", "a malformed notification", ""};
      const uint8_t outcome =
          server_->accept_notification(session, frame.id, std::move(notification));
      send({.type = FrameType::kNotified, .code = outcome, .id = frame.id});
      return {};
    }
    case FrameType::kPing:
      send({.type = FrameType::kPong, .id = frame.id});
      return {};
    case FrameType::kBye:
      server_->on_bye(session);
      return {};
    default:
      return {Code::kCorruption, "transfer.serve",
              "a frame of type " + std::to_string(static_cast<int>(frame.type)) +
                  " from a client", ""};
  }
}

void ServerConnection::on_closed(const Error&) { server_->leave(*this); }

}  // namespace tandem::transfer
