// One TCP connection: sends and receives frames. Their meaning is left to the two derived classes,
// ServerConnection and ClientConnection.
//
// Bytes of slices go straight between the socket and the memory that the derived class names. The
// class can withdraw that memory at any time (`drop_sink`, `drop_output`), after which no byte of
// it is touched; cancellation, deadlines and unregister rely on this. After the handshake a
// connection that needs tags carries its frames in records (records/record.h); code other than
// `flush_locked` and `receive` is the same with and without tags.
//
// Threads: any. Lock order: (1) read_mutex_, held while frames are read and handled, so that they
// are handled in order; (2) the owner's mutex; (3) mutex_, held for one bounded system call.
// on_frame and on_closed are called under (1) or nothing, on_slice_begin and on_slice_end under
// (3).
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/loop/event_loop.h"
#include "transfer/engine/registry.h"
#include "transfer/rails/socket_address.h"
#include "transfer/records/record.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

// Number of records that all connections of an engine have refused.
using RefusedRecords = std::shared_ptr<std::atomic<uint64_t>>;

class Connection : public EventHandler, public std::enable_shared_from_this<Connection> {
 public:
  ~Connection() override;

  // Adds the socket to the event loop. A connecting socket starts when it is writable.
  Status attach();
  void on_events(uint32_t events) override;

  // Queues a frame; `flush` sends it. Does nothing on a closed connection.
  void send(Frame frame, std::string payload = {});
  void flush();

  // Closes the connection for good. Returns true to the one caller that did it. After the return no
  // byte of borrowed memory is touched. Does not call on_closed.
  bool shut(Error reason);
  bool is_shut() const { return is_shut_.load(std::memory_order_acquire); }
  // REQUIRES: is_shut().
  const Error& reason() const { return reason_; }
  // True if the other host answered that nobody listens at that address.
  bool was_refused() const { return was_refused_.load(std::memory_order_relaxed); }
  // Address of this end; empty once the connection is shut.
  SocketAddress local_address() const;
  // Time at which a byte was last moved in either direction.
  int64_t progress_ns() const { return progress_ns_.load(std::memory_order_relaxed); }
  // State of the other host's acknowledgements; it owes none once the connection is shut.
  HostLife host_life(int64_t now_ns) const;
  // Time at which a byte last arrived, which shows that the peer is alive.
  int64_t heard_ns() const { return heard_ns_.load(std::memory_order_relaxed); }
  // True if this end asks for tags. REQUIRES: connected.
  bool asks_for_tags(const TagOptions& options) const;
  // Kind of the connection's tags; kNone without tags or during the handshake.
  TagKind tag_kind() const { return tag_kind_.load(std::memory_order_relaxed); }

 protected:
  // The destination of a slice's bytes; nullptr to read and discard them.
  struct Sink {
    uint8_t* data = nullptr;
  };
  struct Output {
    std::array<uint8_t, kHeaderBytes> header;
    std::string owned;
    const uint8_t* borrowed = nullptr;
    uint64_t size = 0;  // Of the payload.
    uint64_t sent = 0;  // Header included.
    size_t owned_bytes = 0;  // As counted when it was queued.
    uint64_t id = 0;
    Registry::Pin pin;  // Of borrowed memory of ours that a peer reads.
  };

  static void set_payload(Output& output, Frame& frame, std::string payload);

  // `kind` is kAnswers for a connection that this process opened, kRequests for one that a peer
  // opened.
  Connection(EventLoop* loop, EventLoop::Kind kind, int fd, bool is_connecting);

  // From now on, all input is in records, and so is all output after the frames queued so far.
  // Errors: kInternal (the library of the tags failed); kPermissionDenied (bytes came that were
  // sent before the other side can have had the keys). REQUIRES: in on_frame.
  Status begin_records(TagKind kind, const Digest& key_out, const Digest& key_in,
                       RefusedRecords refused);

  virtual void on_connected() {}
  // Refuses a frame before its payload is read. Called under mutex_.
  virtual Status check_header(const Frame& frame) REQUIRES(mutex_) = 0;
  // True if input that was not read when the peer hung up is dropped instead of handled.
  virtual bool is_void_once_hung_up() const { return false; }
  // Called under mutex_ when the connection is shut, to release pinned buffers.
  virtual void on_shut() REQUIRES(mutex_) {}
  // Called when a slice begins to arrive; returns its destination.
  virtual Sink on_slice_begin(const Frame& frame) REQUIRES(mutex_) = 0;
  // Called when all bytes of a slice have arrived. `is_intact` is the result of its checksum.
  virtual void on_slice_end(const Frame& frame, bool is_intact) REQUIRES(mutex_) = 0;
  // Called after on_slice_end for a slice, without mutex_, and with the payload for any other
  // frame. Frames queued here are flushed after it, or after the frames behind it. An error closes
  // the connection.
  virtual Status on_frame(const Frame& frame, std::string payload) = 0;
  virtual void on_closed(const Error& reason) = 0;

  void enqueue(Output output, Frame frame) REQUIRES(mutex_);
  // Stops counting an output's bytes, before the output is erased or replaced.
  void uncount(const Output& output) REQUIRES(mutex_);
  // Sends another frame in place of an output. REQUIRES: not begun.
  void replace(Output& output, Frame frame, std::string payload) REQUIRES(mutex_);
  bool is_begun(const Output& output) const { return output.sent > 0; }

  EventLoop* const loop_;
  const EventLoop::Kind kind_;
  mutable Mutex mutex_;
  Mutex read_mutex_;
  int fd_ GUARDED_BY(mutex_);
  std::deque<Output> outputs_ GUARDED_BY(mutex_);
  size_t owned_bytes_ GUARDED_BY(mutex_) = 0;  // Of outputs_.
  size_t borrowed_bytes_ GUARDED_BY(mutex_) = 0;  // Of outputs_.
  // The slice that is being received.
  std::optional<Frame> incoming_ GUARDED_BY(mutex_);
  Sink sink_ GUARDED_BY(mutex_);

 private:
  enum class ReadStep { kAgain, kFrame, kWait, kFailed };

  void do_read();
  ReadStep read_step(Frame* frame, std::string* payload, Error* error) REQUIRES(mutex_);
  ReadStep read_payload(Frame* frame, std::string* payload, Error* error) REQUIRES(mutex_);
  ssize_t receive(uint8_t* to, size_t size, Error* error, size_t size_behind = 0) REQUIRES(mutex_);
  ssize_t receive_opened(uint8_t* to, size_t size, Error* error) REQUIRES(mutex_);
  // True if buffered bytes, which epoll does not know of, are enough for another step.
  bool has_buffered() const REQUIRES(mutex_);
  bool has_whole_frame() const REQUIRES(mutex_);
  bool has_unsent() const REQUIRES(mutex_) {
    return !outputs_.empty() || (writer_ && !writer_->is_empty());
  }
  bool flush_locked(Error* error) REQUIRES(mutex_);
  int gather(iovec* iov, int max_iov) const REQUIRES(mutex_);
  // Removes the first `size` bytes of the outputs, which were sent or copied into records.
  void consume(uint64_t size) REQUIRES(mutex_);
  void encode(Output& output, Frame frame) REQUIRES(mutex_);
  void want_output(bool is_wanted) REQUIRES(mutex_);
  // The epoll events to wait for.
  uint32_t wanted_events() const REQUIRES(mutex_);
  bool has_hung_up() const REQUIRES(mutex_);
  void fail(Error error);

  std::atomic<bool> is_shut_{false};
  std::atomic<bool> was_refused_{false};
  std::atomic<int64_t> progress_ns_;
  std::atomic<int64_t> heard_ns_{0};
  Error reason_;
  bool is_connecting_ GUARDED_BY(mutex_);
  uint64_t loop_key_ GUARDED_BY(mutex_) = 0;
  bool wants_output_ GUARDED_BY(mutex_) = false;
  bool is_write_broken_ GUARDED_BY(mutex_) = false;
  uint64_t num_sent_ GUARDED_BY(mutex_) = 0;  // Bytes, as the kernel took them.
  std::atomic<TagKind> tag_kind_{TagKind::kNone};
  std::unique_ptr<RecordWriter> writer_ GUARDED_BY(mutex_);
  std::unique_ptr<RecordReader> reader_ GUARDED_BY(mutex_);
  size_t num_bare_ GUARDED_BY(mutex_) = 0;  // Of outputs_: the first, which go ahead of records.
  bool may_receive_ GUARDED_BY(mutex_) = true;
  RefusedRecords refused_ GUARDED_BY(mutex_);
  std::vector<uint8_t> input_ GUARDED_BY(mutex_);
  bool is_drained_ = false;  // The last call left nothing in the socket; more may have come since.
  size_t input_begin_ = 0;
  size_t input_end_ = 0;
  uint64_t incoming_done_ = 0;
  uint32_t incoming_crc_ = 0;
  std::string incoming_payload_;
};

}  // namespace tandem::transfer
