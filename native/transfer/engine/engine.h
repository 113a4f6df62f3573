// The transfer engine of a process: its buffers, its listener, the opened segments, and the threads
// that move bytes. All public methods may be called from any thread.
//
// A forked child has none of the threads: every call fails with kConflict there, and the engine
// must be leaked instead of destroyed (see `is_forked`).
#pragma once

#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/loop/adaptive_spin.h"
#include "transfer/engine/batch.h"
#include "transfer/engine/copier.h"
#include "transfer/loop/event_loop.h"
#include "transfer/wire/fault_plan.h"
#include "transfer/files/file_io.h"
#include "transfer/rails/link_watch.h"
#include "transfer/connections/peer.h"
#include "transfer/engine/registry.h"
#include "transfer/connections/server.h"

namespace tandem::transfer {

struct EngineOptions {
  ServerOptions server;
  PeerOptions peer;
  int io_threads = 1;
  int copy_threads = 1;
  int64_t spin_ns = 200'000;
  FileBackend file_backend = FileBackend::kAuto;
  // Distance factors of the prediction for each local address, by location of memory.
  std::map<std::string, std::vector<double>> penalties;
  // Boards on which this process shares the NICs of its local addresses; empty to share none.
  std::vector<std::string> quota_boards;
  double quota_weight = 1;
};

struct TransferRequest {
  Op op = Op::kRead;
  uint64_t buffer = 0;  // Base of a registered buffer.
  uint64_t local_offset = 0;
  uint64_t segment = 0;  // As given by open or open_file; 0 = our own.
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct BatchCounters {
  uint64_t num_running = 0;
  uint64_t num_done = 0;
  std::array<uint64_t, kCodeNames.size()> num_failed{};  // By code.
  LatencyHistogram latencies;                            // Of those done, submit to end.
};

class Engine {
 public:
  static Result<std::shared_ptr<Engine>> create(EngineOptions options);
  // REQUIRES: not in a forked child.
  ~Engine();

  bool is_forked() const;
  // Ends every batch, unregisters all buffers and closes all connections. Then, or with the last
  // call that still runs in another thread, its threads end and its descriptors are closed. Later
  // calls fail with kConflict; a second close does nothing. Errors: kDeadline (a peer on this host
  // did not unmap a buffer: its memory must stay in place until that process has ended).
  Status close(int64_t deadline_ns);

  Result<uint64_t> register_buffer(BufferSpec spec);
  // Returns when no transfer and no peer touches the buffer. Errors: kNotFound, kDeadline.
  Status unregister(uint64_t base, int64_t deadline_ns);

  Result<uint64_t> open(const std::string& address, int64_t deadline_ns);
  // Opens a file as a segment, whose only buffer begins at 0. Errors: see File::open; kUnsupported
  // (io_uring is demanded, and refused).
  Result<uint64_t> open_file(const FileOptions& file);
  // Closes a segment. Its running batches end with kCancelled.
  Status close_segment(uint64_t segment);
  Result<Description> describe(uint64_t segment, int64_t deadline_ns);
  Result<std::shared_ptr<Peer>> find_peer(uint64_t segment);
  Result<std::shared_ptr<File>> find_file(uint64_t segment);
  // The open segments, without the engine's own and files.
  std::map<uint64_t, std::shared_ptr<Peer>> peers() const;
  // Bytes per second that this process may move by the NIC of each local address now; infinity
  // without a limit.
  std::vector<double> quota_rates() const;

  // Starts to move ranges. Errors: those of the first wrong request (bounds, rights, segment),
  // without moving anything. Later errors are in the batch's status.
  Result<std::shared_ptr<Batch>> submit(const std::vector<TransferRequest>& requests,
                                        int64_t deadline_ns, std::optional<TransportKind> only);
  // Waits until the batch has ended, or the deadline has passed, which ends it with kDeadline.
  // After the return no byte of a local buffer is touched.
  Status wait(const std::shared_ptr<Batch>& batch, int64_t deadline_ns);
  // Returns a descriptor that is readable when the batch has ended; the batch owns it.
  Result<int> completion_fd(const std::shared_ptr<Batch>& batch);
  // Ends the batch with kCancelled, unless it has ended.
  void cancel(const std::shared_ptr<Batch>& batch);

  // Sends a small request to the peer's handler and waits for its answer. Errors: those of
  // Peer::begin_call and of the handler; kDeadline, kPeerLost (executed once or not at all).
  Result<std::string> call(uint64_t segment, std::string payload, int64_t deadline_ns);
  // Begins a call without waiting. Errors: those of Peer::begin_call.
  struct BegunCall {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<PendingCall> call;
  };
  Result<BegunCall> begin_call(uint64_t segment, std::string payload,
                               std::shared_ptr<CallInbox> inbox, uint64_t tag);
  // Waits for a call that was begun without an inbox. Errors: those of `call`.
  Result<std::string> await_call(Peer& peer, const std::shared_ptr<PendingCall>& call,
                                 int64_t deadline_ns);
  // Begins to serve peers' calls, which `wait_calls` returns. Errors: kConflict (they are served
  // already).
  Status serve_calls();
  // Returns up to `max` calls of peers; polls, then sleeps, until there is one. nullopt if the
  // engine is closed.
  std::optional<std::vector<std::shared_ptr<IncomingCall>>> wait_calls(size_t max);
  // The queue of calls, for an event loop that serves them: see CallQueue.
  const std::shared_ptr<CallQueue>& call_queue() const { return server_->calls(); }
  // Handles requests of these engines' peers until `fd` is readable, for as long as polling pays,
  // and at most for `limit_ns`. For an event loop that is about to sleep. Returns true if `fd` is
  // readable.
  static bool poll_requests(const std::vector<std::shared_ptr<Engine>>& engines, int fd,
                            int64_t limit_ns);

  Status notify(uint64_t segment, const std::string& name, const std::string& payload,
                int64_t deadline_ns);
  Result<std::vector<Notification>> take_notifications(int64_t deadline_ns);

  const std::vector<std::string>& addresses() const;
  uint64_t epoch() const { return options_.server.epoch; }
  uint64_t bytes_copied(TransportKind kind) const { return copier_->bytes_moved(kind); }
  // Counts of bytes moved inside this process and to files.
  TransferCounters& counters() { return counters_; }
  BatchCounters batch_counters() const;
  // Number of peers' records that were altered on the way; each closed its connection.
  uint64_t num_refused_records() const { return options_.server.refused->load(); }
  // Makes local, shm, cma or file transfers fail as planned from now on; null ends this. Returns
  // the former plan, or null.
  std::shared_ptr<FaultPlan> set_faults(TransportKind kind, std::shared_ptr<FaultPlan> plan);
  // Returns "io_uring" or "threads", with the reason why io_uring is not used; empty before the
  // first file.
  std::pair<std::string, std::string> file_backend() const;

 private:
  // A running call that needs the engine's threads: they stay until it ends.
  class Use {
   public:
    explicit Use(Engine& engine) : engine_(engine.enter() ? &engine : nullptr) {}
    ~Use() {
      if (engine_ != nullptr) engine_->leave();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    // False if the threads are gone, so that there is nothing to wait for.
    explicit operator bool() const { return engine_ != nullptr; }

   private:
    Engine* const engine_;
  };
  bool enter();
  void leave();
  // Ends all threads and closes the descriptors of the event loops.
  void retire();

  explicit Engine(EngineOptions options) : options_(std::move(options)) {}
  Status start();
  Status check_open() const;
  AdaptiveSpin& spin_of_thread() const;
  // Waits for an end; returns false at the deadline. This thread does the work of the I/O threads
  // meanwhile, so that nobody has to wake it.
  bool await(Completion& completion, int64_t deadline_ns);
  bool await(Completion& completion, int64_t deadline_ns, AdaptiveSpin& spin);
  Result<std::shared_ptr<Batch>> make_batch(const std::vector<TransferRequest>& requests,
                                            int64_t deadline_ns,
                                            std::optional<TransportKind> only);
  struct Target;
  Result<Target> find_target(uint64_t segment);
  Status check_remote(const TransferRequest& request, const Target& target);
  void on_batch_end(const Batch& batch, const Status& status);
  void abort(const std::shared_ptr<Batch>& batch, Error error);
  // Adds a batch to those that the timer watches; returns false if the engine was closed.
  bool watch(const std::shared_ptr<Batch>& batch);
  void unwatch(const Batch& batch);
  void schedule(int64_t due_ns);
  void run_timer();
  int64_t tick(int64_t now_ns, int64_t late_ns);
  std::shared_ptr<FaultPlan> faults(TransportKind kind) const;
  void fence_own();
  void copy(std::vector<Piece> pieces, std::shared_ptr<Mapping> mapping);

  const EngineOptions options_;
  TransferCounters counters_;
  mutable Mutex counters_mutex_;  // Leaf.
  BatchCounters batch_counters_ GUARDED_BY(counters_mutex_);
  const int owner_pid_ = static_cast<int>(::getpid());
  std::atomic<int> num_uses_{1};  // One is the engine's own, until it is closed.
  Registry registry_;
  std::shared_ptr<Mapping> own_segment_;
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::vector<EventLoop*> loop_pointers_;
  std::unique_ptr<Copier> copier_;
  std::shared_ptr<Server> server_;
  std::shared_ptr<LinkWatch> link_watch_;
  std::map<std::string, size_t> locations_;

  mutable Mutex mutex_;
  bool is_closed_ GUARDED_BY(mutex_) = false;
  std::map<uint64_t, std::shared_ptr<Peer>> peers_ GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<File>> files_ GUARDED_BY(mutex_);
  std::atomic<bool> has_faults_{false};
  std::map<TransportKind, std::shared_ptr<FaultPlan>> faults_ GUARDED_BY(mutex_);
  std::unique_ptr<FileIo> file_io_;  // Made with the first file; written under mutex_.
  uint64_t next_segment_ GUARDED_BY(mutex_) = 1;
  std::multimap<int64_t, std::shared_ptr<Batch>> watched_ GUARDED_BY(mutex_);
  size_t sweep_size_ GUARDED_BY(mutex_) = 1024;

  Mutex timer_mutex_;  // Leaf.
  CondVar timer_changed_;
  int64_t timer_due_ns_ GUARDED_BY(timer_mutex_) = 0;
  bool is_timer_stopping_ GUARDED_BY(timer_mutex_) = false;
  std::thread timer_;
};

}  // namespace tandem::transfer
