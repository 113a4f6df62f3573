// The server side of transfers: listens, authenticates peers, serves slices from the registry, and
// keeps the peers' sessions, grants and notifications.
//
// A session is one opened segment of one peer: a control connection and rails. It outlives its
// connections, so that a notification that is repeated after a reconnection is recognised, and a
// grant (a peer's direct access to this process's memory) is not forgotten with a broken
// connection.
//
// Lock order: (1) Connection::read_mutex_, (2) Server::mutex_, (3) Connection::mutex_, (4)
// Registry.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/connections/call_queue.h"
#include "transfer/connections/connection.h"
#include "transfer/engine/registry.h"
#include "transfer/rails/socket_address.h"

namespace tandem::transfer {

struct ServerOptions {
  std::string name;
  std::string secret;
  uint64_t epoch = 0;
  ProcessId process;
  std::vector<std::string> listen;
  std::vector<std::string> advertise;  // Empty: the addresses listened on.
  int64_t handshake_timeout_ns = 2'000'000'000;
  size_t max_connections = 4096;
  size_t max_notifications = 4096;
  int socket_buffer_bytes = 0;
  TagOptions tags;
  RefusedRecords refused = std::make_shared<std::atomic<uint64_t>>(0);
};

struct Notification {
  std::string peer;
  std::string name;
  std::string payload;
};

class ServerConnection;

class Server : public std::enable_shared_from_this<Server> {
 public:
  // Tells the timer the time at which `tick` is due.
  using Schedule = std::function<void(int64_t due_ns)>;

  static Result<std::shared_ptr<Server>> start(ServerOptions options, Registry* registry,
                                               std::vector<EventLoop*> loops, Schedule schedule);
  // Closes all connections. After the return no byte of a registered buffer is touched over them.
  void close();

  const std::vector<std::string>& addresses() const { return addresses_; }
  // Withdraws a buffer from the connections that serve it, and waits until each peer with a grant
  // has confirmed that it has unmapped the buffer, has disconnected, or is dead. REQUIRES: the
  // registry has closed the buffer. Errors: kDeadline (names the peer).
  Status revoke(uint64_t base, int64_t deadline_ns);
  // Returns the notifications since the last call; waits for one until the deadline.
  std::vector<Notification> take_notifications(int64_t deadline_ns);
  // Closes connections whose handshake takes too long, and ends pauses of listeners; returns the
  // time of the next call.
  int64_t tick(int64_t now_ns);
  // Closes connections that a peer has given up, after which none of their bytes reach memory.
  void fence(const std::vector<FenceDebt>& debts);
  size_t num_connections() const;
  const std::shared_ptr<CallQueue>& calls() const { return calls_; }

 private:
  friend class ServerConnection;
  class Listener;
  struct Session {
    ProcessId process;
    std::string name;
    std::map<uint32_t, std::weak_ptr<ServerConnection>> connections;
    std::weak_ptr<ServerConnection> control;
    std::set<uint64_t> grants;  // Bases of buffers that the peer may reach by itself.
    uint64_t last_sequence = 0;
    uint8_t last_outcome = 0;
    bool has_left = false;
  };

  Server(ServerOptions options, Registry* registry, std::vector<EventLoop*> loops,
         Schedule schedule);
  Status open_listener(const std::string& address);
  void admit(int fd);
  // Stops accepting for a while, because no descriptor is left for another connection.
  void pause(const std::shared_ptr<Listener>& listener);
  // Adds a connection whose proof is right to its session. Errors: kCapacity.
  Status join(const std::shared_ptr<ServerConnection>& connection, const Hello& hello);
  void leave(ServerConnection& connection);
  void sweep_sessions() REQUIRES(mutex_);
  bool may_reach(const Session& session) const;

  Result<Grant> grant(const std::string& session, uint64_t offset);
  void on_revoked(const std::string& session, uint64_t base);
  uint8_t accept_notification(const std::string& session, uint64_t sequence,
                              Notification notification);
  void on_bye(const std::string& session);
  Description describe(const ServerConnection& connection) const;

  const ServerOptions options_;
  Registry* const registry_;
  const std::vector<EventLoop*> loops_;
  const Schedule schedule_;
  const std::string cookie_;
  const std::shared_ptr<CallQueue> calls_ = std::make_shared<CallQueue>();
  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<Listener>> listeners_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool is_closed_ GUARDED_BY(mutex_) = false;
  std::set<std::shared_ptr<ServerConnection>> connections_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Listener>> paused_ GUARDED_BY(mutex_);
  int64_t paused_until_ns_ GUARDED_BY(mutex_) = 0;
  std::map<std::string, Session> sessions_ GUARDED_BY(mutex_);
  std::set<uint64_t> revoking_ GUARDED_BY(mutex_);
  std::vector<Notification> notifications_ GUARDED_BY(mutex_);
  size_t next_loop_ GUARDED_BY(mutex_) = 0;
};

// A connection that a peer opened to this process.
class ServerConnection : public Connection {
 public:
  ServerConnection(std::shared_ptr<Server> server, EventLoop* loop, int fd);

  bool is_ready() const { return is_ready_.load(std::memory_order_acquire); }
  int64_t begin_ns() const { return begin_ns_; }
  const Hello& hello() const { return hello_; }
  // Withdraws a buffer: a WRITE that is arriving there is discarded and refused, a READ is refused.
  // Returns false if the answer to a READ has been begun: then only closing the connection takes it
  // back, and the peer repeats the READ over another.
  bool drop_buffer(uint64_t base);

 protected:
  Status check_header(const Frame& frame) override REQUIRES(mutex_);
  Sink on_slice_begin(const Frame& frame) override REQUIRES(mutex_);
  void on_slice_end(const Frame& frame, bool is_intact) override REQUIRES(mutex_);
  Status on_frame(const Frame& frame, std::string payload) override;
  void on_closed(const Error& reason) override;
  void on_shut() override REQUIRES(mutex_);
  bool is_void_once_hung_up() const override;

 private:
  Status on_hello(std::string payload);
  Status on_proof(std::string_view payload);
  Status on_control(const Frame& frame, std::string payload);
  void serve_read(const Frame& frame);
  void answer(FrameType type, const Frame& request, const Status& status);

  const std::shared_ptr<Server> server_;
  const int64_t begin_ns_;
  std::atomic<bool> is_ready_{false};
  // Written before is_ready_ is set.
  Hello hello_;
  std::string hello_payload_;
  Challenge challenge_;
  // Pins the buffer that the arriving slice is written to.
  Registry::Pin write_pin_ GUARDED_BY(mutex_);
  Status write_status_ GUARDED_BY(mutex_);
  uint64_t last_slice_id_ = 0;
  uint64_t last_call_id_ = 0;
};

}  // namespace tandem::transfer
