#include "transfer/connections/connection.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/threads/idle_spin.h"
#include "transfer/wire/crc32c.h"

namespace tandem::transfer {
namespace {

// Frames without data, and the first bytes of a slice, pass through a buffer of this size. The rest
// of a slice is received in place.
constexpr size_t kInputBytes = 16 << 10;
// Limit of one system call, and so of one hold of the mutex: about 100 us. The rest of a slice
// whose beginning is sent may take 400 us, which saves 5 % of the time at 16 MiB. A mebibyte is
// faster in two parts, since the peer receives the first while the second is sent.
constexpr size_t kMaxIoBytes = 512 << 10;
constexpr size_t kMaxRestBytes = 2 << 20;
// A payload buffer grows in steps of this, so that a peer cannot make this process allocate memory
// by claiming a size.
constexpr size_t kPayloadStepBytes = 128 << 10;
// Limit of steps for one connection before the event loop serves the others.
constexpr int kStepsPerEvent = 16;
constexpr int kMaxIov = 64;
// Limit of queued frames: a peer that sends requests and reads no answers is closed.
constexpr size_t kMaxOutputs = 1 << 16;
constexpr size_t kMaxOwnedBytes = 2 * kMaxCallBytesInFlight;
// Limit of the bytes of slices that a peer has asked for. A peer of this implementation asks for at
// most 768 MiB at a time, see RailSet.
constexpr size_t kMaxAskedBytes = 1 << 30;

Error lost(std::string what) { return {Code::kPeerLost, "transfer.io", std::move(what), ""}; }

}  // namespace

Connection::Connection(EventLoop* loop, EventLoop::Kind kind, int fd, bool is_connecting)
    : loop_(loop),
      kind_(kind),
      fd_(fd),
      progress_ns_(now_ns()),
      is_connecting_(is_connecting),
      input_(kInputBytes) {}

Connection::~Connection() {
  if (fd_ >= 0) close(fd_);
}

Status Connection::attach() {
  const MutexLock lock(mutex_);
  wants_output_ = is_connecting_;
  Result<uint64_t> key = loop_->add(fd_, wanted_events(), weak_from_this(), kind_);
  if (!key.is_ok()) return key.error();
  loop_key_ = key.value();
  return {};
}

void Connection::on_events(uint32_t events) {
  if (events & EPOLLOUT) {
    bool has_connected = false;
    int refused = 0;
    {
      const MutexLock lock(mutex_);
      if (fd_ < 0) return;
      if (is_connecting_) {
        socklen_t size = sizeof refused;
        getsockopt(fd_, SOL_SOCKET, SO_ERROR, &refused, &size);
        is_connecting_ = refused != 0;
        has_connected = refused == 0;
      }
    }
    was_refused_.store(refused == ECONNREFUSED, std::memory_order_relaxed);
    if (refused != 0) return fail(lost(describe_errno("connect", refused)));
    if (has_connected) on_connected();
    flush();
  }
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) && is_void_once_hung_up())
    return fail(lost("the peer hung up"));
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) do_read();
}

void Connection::send(Frame frame, std::string payload) {
  Output output;
  set_payload(output, frame, std::move(payload));
  const MutexLock lock(mutex_);
  enqueue(std::move(output), frame);
}

void Connection::set_payload(Output& output, Frame& frame, std::string payload) {
  output.size = payload.size();
  if (!payload.empty()) {
    frame.flags |= kFlagHasCrc;
    frame.payload_crc = crc32c(0, payload.data(), payload.size());
  }
  output.owned = std::move(payload);
}

void Connection::enqueue(Output output, Frame frame) {
  if (fd_ < 0 || is_write_broken_) return;
  encode(output, frame);
  outputs_.push_back(std::move(output));
}

void Connection::encode(Output& output, Frame frame) {
  frame.payload_bytes = static_cast<uint32_t>(output.size);
  output.id = frame.id;
  output.owned_bytes = output.owned.size();
  owned_bytes_ += output.owned_bytes;
  if (output.borrowed != nullptr) borrowed_bytes_ += output.size;
  encode_header(frame, output.header.data());
}

void Connection::uncount(const Output& output) {
  owned_bytes_ -= output.owned_bytes;
  if (output.borrowed != nullptr) borrowed_bytes_ -= output.size;
}

void Connection::replace(Output& output, Frame frame, std::string payload) {
  uncount(output);
  output.borrowed = nullptr;
  output.pin.reset();
  set_payload(output, frame, std::move(payload));
  encode(output, frame);
}

Status Connection::begin_records(TagKind kind, const Digest& key_out, const Digest& key_in,
                                 RefusedRecords refused) {
  auto out = Tagger::create(kind, key_out), in = Tagger::create(kind, key_in);
  if (!out || !in)
    return {Code::kInternal, "transfer.begin_records",
            "no tags by " + std::string(tag_name(kind)), ""};
  const MutexLock lock(mutex_);
  if (input_begin_ != input_end_)
    return {Code::kPermissionDenied, "transfer.begin_records",
            "bytes without a tag came after the handshake", ""};
  writer_ = std::make_unique<RecordWriter>(std::move(out));
  reader_ = std::make_unique<RecordReader>(std::move(in));
  num_bare_ = outputs_.size();
  refused_ = std::move(refused);
  tag_kind_.store(kind, std::memory_order_relaxed);
  return {};
}

void Connection::flush() {
  Error error;
  bool is_ok = true;
  // Release the mutex between system calls, so that a cancellation never waits for a whole queue.
  for (bool has_more = true; has_more && is_ok;) {
    const MutexLock lock(mutex_);
    if (fd_ < 0 || is_connecting_ || is_write_broken_) return;
    const uint64_t sent_before = num_sent_;
    is_ok = flush_locked(&error);
    has_more = is_ok && has_unsent() && !wants_output_ && num_sent_ != sent_before;
  }
  if (is_ok) return;
  // Leave the end of the connection to the reading side, after all that the peer had sent: a
  // confirmation or a good-bye must not be lost because an answer to it could not be sent.
  const MutexLock lock(mutex_);
  if (fd_ < 0) return;
  is_write_broken_ = true;
  outputs_.clear();
  owned_bytes_ = borrowed_bytes_ = 0;
  want_output(false);
}

int Connection::gather(iovec* iov, int max_iov) const {
  int num_iov = 0;
  size_t total = 0;
  const bool is_rest = !outputs_.empty() && outputs_.front().sent >= kMaxIoBytes;
  const size_t count = num_bare_ > 0 ? num_bare_ : outputs_.size();
  for (size_t i = 0; i < count; ++i) {
    const Output& output = outputs_[i];
    // Only the rest of the first slice may use the larger limit, not the slices behind it.
    const size_t most = is_rest && total == 0 ? kMaxRestBytes : kMaxIoBytes;
    if (num_iov + 2 > max_iov || total >= most) break;
    if (output.sent < kHeaderBytes)
      iov[num_iov++] = {const_cast<uint8_t*>(output.header.data()) + output.sent,
                        kHeaderBytes - output.sent};
    const uint64_t done = output.sent > kHeaderBytes ? output.sent - kHeaderBytes : 0;
    const size_t part = std::min<uint64_t>(output.size - done, most - total);
    const uint8_t* data = output.borrowed != nullptr
                              ? output.borrowed
                              : reinterpret_cast<const uint8_t*>(output.owned.data());
    if (part > 0) iov[num_iov++] = {const_cast<uint8_t*>(data) + done, part};
    total += part;
  }
  return num_iov;
}

void Connection::consume(uint64_t size) {
  while (size > 0) {
    Output& front = outputs_.front();
    const uint64_t part = std::min(size, kHeaderBytes + front.size - front.sent);
    front.sent += part;
    size -= part;
    if (front.sent < kHeaderBytes + front.size) continue;
    uncount(front);
    outputs_.pop_front();
    if (num_bare_ > 0) --num_bare_;
  }
}

// Makes one system call. Returns false on a broken connection.
bool Connection::flush_locked(Error* error) {
  const bool is_asked = kind_ == EventLoop::Kind::kRequests;
  if (outputs_.size() > kMaxOutputs || owned_bytes_ > kMaxOwnedBytes ||
      (is_asked && borrowed_bytes_ > kMaxAskedBytes)) {
    *error = lost("the peer reads no answers");
    shutdown(fd_, SHUT_RDWR);
    return false;
  }
  if (!has_unsent()) {
    want_output(false);
    return true;
  }
  iovec iov[kMaxIov];
  const bool is_sealed = writer_ && num_bare_ == 0;
  int num_iov = is_sealed && !writer_->is_empty() ? 0 : gather(iov, kMaxIov);
  if (is_sealed) {
    if (num_iov > 0) {
      const size_t taken = writer_->seal(iov, num_iov);
      if (taken == 0) {
        *error = {Code::kInternal, "transfer.seal_record", "the library of the tags failed", ""};
        shutdown(fd_, SHUT_RDWR);
        return false;
      }
      consume(taken);
    }
    iov[0] = {const_cast<uint8_t*>(writer_->data()), writer_->size()};
    num_iov = 1;
  }
  msghdr message{};
  message.msg_iov = iov;
  message.msg_iovlen = static_cast<size_t>(num_iov);
  const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno == EINTR) return true;
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    want_output(true);
    return true;
  }
  if (sent < 0) {
    *error = lost(describe_errno("send", errno));
    return false;
  }
  progress_ns_.store(now_ns(), std::memory_order_relaxed);
  num_sent_ += static_cast<uint64_t>(sent);
  if (is_sealed)
    writer_->on_sent(static_cast<size_t>(sent));
  else
    consume(static_cast<uint64_t>(sent));
  if (!has_unsent()) want_output(false);
  return true;
}

void Connection::want_output(bool is_wanted) {
  if (is_wanted == wants_output_) return;
  wants_output_ = is_wanted;
  loop_->modify(loop_key_, fd_, wanted_events());
}

uint32_t Connection::wanted_events() const {
  const uint32_t hang_up = kind_ == EventLoop::Kind::kRequests ? EPOLLRDHUP : 0u;
  return EPOLLIN | hang_up | (wants_output_ ? EPOLLOUT : 0u);
}

bool Connection::has_hung_up() const {
  pollfd state{fd_, POLLRDHUP, 0};
  return poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void Connection::do_read() {
  const MutexLock reading(read_mutex_);
  bool has_answers = false;
  bool is_first = true, is_buffered = false;
  // Handle all buffered frames now, since epoll does not know of them. Their answers are sent
  // together: a system call for each costs more than a small slice.
  for (int step = 0; step < kStepsPerEvent || is_buffered; step += !is_buffered) {
    Frame frame;
    std::string payload;
    Error error;
    ReadStep result;
    {
      const MutexLock lock(mutex_);
      if (fd_ < 0) return;
      may_receive_ = step < kStepsPerEvent;
      // Check for a hang-up since the event. A single request never reaches a second step.
      if ((reader_ ? !is_first : step > 0) && is_void_once_hung_up() && has_hung_up()) {
        error = lost("the peer hung up");
        result = ReadStep::kFailed;
      } else {
        result = read_step(&frame, &payload, &error);
      }
      is_buffered = has_buffered();
      is_first = false;
    }
    if (result == ReadStep::kWait) break;
    if (result == ReadStep::kAgain) continue;
    if (result == ReadStep::kFrame) {
      const Status status = on_frame(frame, std::move(payload));
      has_answers = true;
      if (!status.is_ok()) {
        error = status.error();
        result = ReadStep::kFailed;
      }
    }
    if (result == ReadStep::kFailed) {
      flush();  // What came before is answered.
      return fail(std::move(error));
    }
    const MutexLock lock(mutex_);
    if (!is_buffered && is_drained_) break;
  }
  if (has_answers) flush();
}

// True if the next frame needs no more bytes from the socket.
bool Connection::has_whole_frame() const {
  const size_t size = input_end_ - input_begin_;
  return size >= kHeaderBytes && size - kHeaderBytes >= peek_payload_bytes(&input_[input_begin_]);
}

bool Connection::has_buffered() const {
  return has_whole_frame() || (reader_ && reader_->has_more());
}

// Receives into `to`, and up to `size_behind` bytes behind it into the empty input buffer.
ssize_t Connection::receive(uint8_t* to, size_t size, Error* error, size_t size_behind) {
  if (reader_) return receive_opened(to, size, error);
  ssize_t got;
  if (size_behind == 0) {
    got = recv(fd_, to, size, MSG_DONTWAIT);
  } else {
    iovec iov[2] = {{to, size}, {input_.data(), size_behind}};
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = 2;
    got = recvmsg(fd_, &message, MSG_DONTWAIT);
    input_begin_ = 0;
    input_end_ = got > static_cast<ssize_t>(size) ? static_cast<size_t>(got) - size : 0;
  }
  is_drained_ = got < static_cast<ssize_t>(size + size_behind);
  if (got > 0) {
    const int64_t now = now_ns();
    progress_ns_.store(now, std::memory_order_relaxed);
    heard_ns_.store(now, std::memory_order_relaxed);
    return got;
  }
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  *error = lost(got == 0 ? "the peer closed the connection" : describe_errno("recv", errno));
  return -1;
}

// Does the same for bytes whose tags were checked. The copy from the reader is cheap, because the
// record has just been read for its tag and is in a cache.
ssize_t Connection::receive_opened(uint8_t* to, size_t size, Error* error) {
  size_t done = 0;
  while (true) {
    done += reader_->take(to + done, size - done);
    if (done == size) break;
    Result<bool> opened = reader_->open();
    if (!opened.is_ok()) {
      refused_->fetch_add(1, std::memory_order_relaxed);
      *error = opened.error();
      return -1;
    }
    if (opened.value()) {
      heard_ns_.store(now_ns(), std::memory_order_relaxed);
      continue;
    }
    if (done > 0 || !may_receive_) break;
    const auto [space, room] = reader_->space();
    const ssize_t got = recv(fd_, space, room, MSG_DONTWAIT);
    is_drained_ = got < static_cast<ssize_t>(room);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (got <= 0) {
      *error = lost(got == 0 ? "the peer closed the connection" : describe_errno("recv", errno));
      return -1;
    }
    progress_ns_.store(now_ns(), std::memory_order_relaxed);
    reader_->add(static_cast<size_t>(got));
  }
  return static_cast<ssize_t>(done);
}

Connection::ReadStep Connection::read_step(Frame* frame, std::string* payload, Error* error) {
  if (incoming_) return read_payload(frame, payload, error);
  if (input_end_ - input_begin_ < kHeaderBytes) {
    std::memmove(input_.data(), input_.data() + input_begin_, input_end_ - input_begin_);
    input_end_ -= input_begin_;
    input_begin_ = 0;
    const ssize_t got = receive(input_.data() + input_end_, kInputBytes - input_end_, error);
    if (got < 0) return ReadStep::kFailed;
    if (got == 0) return ReadStep::kWait;
    input_end_ += static_cast<size_t>(got);
    if (input_end_ < kHeaderBytes) return ReadStep::kAgain;
  }
  Result<Frame> header = decode_header(input_.data() + input_begin_);
  if (!header.is_ok()) {
    *error = header.error();
    return ReadStep::kFailed;
  }
  if (Status status = check_header(header.value()); !status.is_ok()) {
    *error = status.error();
    return ReadStep::kFailed;
  }
  input_begin_ += kHeaderBytes;
  incoming_ = header.value();
  incoming_done_ = 0;
  incoming_crc_ = 0;
  incoming_payload_.clear();
  sink_ = carries_slice(*incoming_) ? on_slice_begin(*incoming_) : Sink{};
  return read_payload(frame, payload, error);
}

Connection::ReadStep Connection::read_payload(Frame* frame, std::string* payload, Error* error) {
  const bool is_slice = carries_slice(*incoming_);
  const uint64_t size = incoming_->payload_bytes;
  while (incoming_done_ < size) {
    uint8_t scratch[4096];
    const uint64_t left = size - incoming_done_;
    uint8_t* to = sink_.data != nullptr ? sink_.data + incoming_done_ : nullptr;
    size_t part = std::min<uint64_t>(left, input_end_ - input_begin_);
    const uint8_t* from = input_.data() + input_begin_;
    if (part > 0) {
      if (to != nullptr) std::memcpy(to, from, part);
      if (!is_slice) incoming_payload_.append(reinterpret_cast<const char*>(from), part);
      input_begin_ += part;
    } else {
      // Unwanted slices are read into scratch memory; payloads of other frames grow as they arrive.
      part = to != nullptr ? std::min<uint64_t>(left, kMaxIoBytes)
             : is_slice    ? std::min<uint64_t>(left, sizeof scratch)
                           : std::min<uint64_t>(left, kPayloadStepBytes);
      if (!is_slice) {
        incoming_payload_.resize(incoming_done_ + part);
        to = reinterpret_cast<uint8_t*>(incoming_payload_.data()) + incoming_done_;
      }
      // With the end of a slice, also read the header of the next frame, and of small slices more.
      const size_t behind = to == nullptr || part < left ? 0
                            : size < kInputBytes         ? kInputBytes
                                                         : kHeaderBytes;
      const ssize_t got = receive(to != nullptr ? to : scratch, part, error, behind);
      if (got < 0) return ReadStep::kFailed;
      part = std::min(part, static_cast<size_t>(got));
      if (!is_slice) incoming_payload_.resize(incoming_done_ + part);
      if (part == 0) return ReadStep::kWait;
      from = to != nullptr ? to : scratch;
    }
    if (incoming_->flags & kFlagHasCrc) incoming_crc_ = crc32c(incoming_crc_, from, part);
    incoming_done_ += part;
    if (incoming_done_ < size && (reader_ || part >= kMaxIoBytes / 2)) return ReadStep::kAgain;
  }
  const bool is_intact =
      !(incoming_->flags & kFlagHasCrc) || incoming_crc_ == incoming_->payload_crc;
  if (!is_slice && !is_intact) {
    *error = {Code::kCorruption, "transfer.io", "a frame with a wrong check sum", ""};
    return ReadStep::kFailed;
  }
  if (is_slice) on_slice_end(*incoming_, is_intact);
  *frame = *incoming_;
  *payload = std::move(incoming_payload_);
  incoming_payload_ = {};
  incoming_.reset();
  sink_ = {};
  return ReadStep::kFrame;
}

SocketAddress Connection::local_address() const {
  const MutexLock lock(mutex_);
  return fd_ < 0 ? SocketAddress{} : local_address_of(fd_);
}

bool Connection::asks_for_tags(const TagOptions& options) const {
  if (options.policy != TagPolicy::kAuto) return options.policy == TagPolicy::kAlways;
  const MutexLock lock(mutex_);
  return fd_ < 0 || !stays_on_host(remote_address_of(fd_), local_address_of(fd_));
}

HostLife Connection::host_life(int64_t now_ns) const {
  const MutexLock lock(mutex_);
  HostLife life = fd_ < 0 ? HostLife{} : host_life_of(fd_, now_ns);
  life.heard_ns = std::max(life.heard_ns, heard_ns());
  return life;
}

bool Connection::shut(Error reason) {
  const MutexLock lock(mutex_);
  if (fd_ < 0) return false;
  if (loop_key_ != 0) loop_->remove(loop_key_, fd_);
  close(fd_);
  fd_ = -1;
  outputs_.clear();
  owned_bytes_ = borrowed_bytes_ = 0;
  incoming_.reset();
  sink_ = {};
  on_shut();
  reason_ = std::move(reason);
  is_shut_.store(true, std::memory_order_release);
  return true;
}

void Connection::fail(Error error) {
  if (shut(error)) on_closed(error);
}

}  // namespace tandem::transfer
