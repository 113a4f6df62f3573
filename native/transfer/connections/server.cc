#include "transfer/connections/server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <limits>

#include "base/threads/idle_spin.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

constexpr size_t kMaxSessions = 4096;
constexpr size_t kCookieBytes = 16;
// Interval at which a waiting unregister checks whether a silent peer has died.
constexpr int64_t kAlivePollNs = 20'000'000;
// Pause after a failed accept: the listening socket stays ready, and would be tried again at once.
constexpr int64_t kAcceptPauseNs = 100'000'000;

// True if a descriptor is one of the last that the process may have, which are reserved for its own
// use. tandem.core.descriptors applies the same rule.
bool is_scarce(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  const rlim_t reserve = std::clamp<rlim_t>(limit.rlim_cur / 4, 16, 256);
  return static_cast<rlim_t>(fd) + reserve >= limit.rlim_cur;
}

}  // namespace

class Server::Listener : public EventHandler, public std::enable_shared_from_this<Listener> {
 public:
  Listener(std::weak_ptr<Server> server, EventLoop* loop, int fd)
      : server_(std::move(server)), loop_(loop), fd_(fd) {}
  ~Listener() override { ::close(fd_); }

  void on_events(uint32_t) override {
    const std::shared_ptr<Server> server = server_.lock();
    if (!server) return;
    // Accept a limited number of connections at once, so that a flood of them does not starve the
    // event loop.
    for (int i = 0; i < 16; ++i) {
      const int fd = accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        server->admit(fd);
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        server->pause(shared_from_this());
        return;
      } else if (errno != ECONNABORTED && errno != EINTR) {
        return;
      }
    }
  }

  EventLoop* loop() const { return loop_; }
  int fd() const { return fd_; }
  std::atomic<uint64_t> key{0};  // Of the loop; 0: it has none yet.

 private:
  const std::weak_ptr<Server> server_;
  EventLoop* const loop_;
  const int fd_;
};

Result<std::shared_ptr<Server>> Server::start(ServerOptions options, Registry* registry,
                                              std::vector<EventLoop*> loops, Schedule schedule) {
  std::shared_ptr<Server> server(
      new Server(std::move(options), registry, std::move(loops), std::move(schedule)));
  for (const std::string& address : server->options_.listen)
    if (Status status = server->open_listener(address); !status.is_ok()) {
      server->close();
      return status.error();
    }
  return server;
}

Server::Server(ServerOptions options, Registry* registry, std::vector<EventLoop*> loops,
               Schedule schedule)
    : options_(std::move(options)),
      registry_(registry),
      loops_(std::move(loops)),
      schedule_(std::move(schedule)),
      cookie_(random_bytes(kCookieBytes)) {}

Status Server::open_listener(const std::string& text) {
  Result<PortRange> range = parse_port_range(text);
  if (!range.is_ok()) return range.error();
  Result<int> fd = listen_on(range.value().address);
  for (uint32_t port = range.value().address.port() + 1u;
       !fd.is_ok() && fd.error().code == Code::kConflict && port <= range.value().last_port;
       ++port) {
    range.value().address.set_port(static_cast<uint16_t>(port));
    fd = listen_on(range.value().address);
  }
  if (!fd.is_ok()) return fd.error();
  auto listener = std::make_shared<Listener>(weak_from_this(), loops_[0], fd.value());
  Result<uint64_t> key = loops_[0]->add(listener->fd(), EPOLLIN, listener,
                                           EventLoop::Kind::kRequests);
  if (!key.is_ok()) return key.error();
  listener->key = key.value();
  addresses_.push_back(local_address_of(listener->fd()).text());
  listeners_.push_back(std::move(listener));
  return {};
}

void Server::close() {
  for (const auto& listener : listeners_) listener->loop()->remove(listener->key, listener->fd());
  listeners_.clear();
  std::set<std::shared_ptr<ServerConnection>> connections;
  {
    const MutexLock lock(mutex_);
    is_closed_ = true;
    connections.swap(connections_);
    paused_.clear();
    changed_.notify_all();
  }
  for (const auto& connection : connections)
    connection->shut({Code::kConflict, "transfer.close", "the engine was closed", ""});
  calls_->close();
}

void Server::pause(const std::shared_ptr<Listener>& listener) {
  if (listener->key == 0) return;
  listener->loop()->modify(listener->key, listener->fd(), 0);
  int64_t until_ns;
  {
    const MutexLock lock(mutex_);
    if (is_closed_) return;
    paused_.push_back(listener);
    until_ns = paused_until_ns_ = now_ns() + kAcceptPauseNs;
  }
  schedule_(until_ns);
}

void Server::admit(int fd) {
  if (is_scarce(fd)) {
    ::close(fd);
    return;
  }
  tune_stream(fd, remote_address_of(fd), options_.socket_buffer_bytes);
  std::shared_ptr<ServerConnection> connection;
  {
    const MutexLock lock(mutex_);
    if (is_closed_ || connections_.size() >= options_.max_connections) {
      ::close(fd);
      return;
    }
    EventLoop* loop = loops_[next_loop_++ % loops_.size()];
    connection = std::make_shared<ServerConnection>(shared_from_this(), loop, fd);
    connections_.insert(connection);
  }
  if (Status status = connection->attach(); !status.is_ok()) {
    connection->shut(status.error());
    leave(*connection);
    return;
  }
  schedule_(now_ns() + options_.handshake_timeout_ns);
}

Status Server::join(const std::shared_ptr<ServerConnection>& connection, const Hello& hello) {
  std::set<uint64_t> to_revoke;
  {
    const MutexLock lock(mutex_);
    if (is_closed_) return {Code::kPeerLost, "transfer.join", "the engine is closing", ""};
    auto found = sessions_.find(hello.session);
    if (found == sessions_.end()) {
      if (sessions_.size() >= kMaxSessions) sweep_sessions();
      if (sessions_.size() >= kMaxSessions)
        return {Code::kCapacity, "transfer.join", "too many sessions", ""};
      found = sessions_.emplace(hello.session, Session{}).first;
      found->second.process = hello.process;
      found->second.name = hello.name;
    }
    Session& session = found->second;
    session.connections[hello.connection_id] = connection;
    if (hello.role == Role::kControl) {
      session.control = connection;
      std::set_intersection(revoking_.begin(), revoking_.end(), session.grants.begin(),
                            session.grants.end(), std::inserter(to_revoke, to_revoke.end()));
    }
  }
  connection->send({.type = FrameType::kReady});
  for (const uint64_t base : to_revoke)
    connection->send({.type = FrameType::kRevoke, .offset = base});
  return {};
}

void Server::leave(ServerConnection& connection) {
  const MutexLock lock(mutex_);
  connections_.erase(std::static_pointer_cast<ServerConnection>(connection.shared_from_this()));
  if (!connection.is_ready()) return;
  const auto found = sessions_.find(connection.hello().session);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  const auto own = session.connections.find(connection.hello().connection_id);
  if (own != session.connections.end() && own->second.lock().get() == &connection)
    session.connections.erase(own);
  if (session.has_left && session.connections.empty()) sessions_.erase(found);
}

// Forgets the sessions of peers that will not return.
void Server::sweep_sessions() {
  std::erase_if(sessions_, [&](const auto& item) {
    const Session& session = item.second;
    if (!session.connections.empty()) return false;
    return session.has_left || !may_reach(session) || !is_alive(session.process);
  });
}

bool Server::may_reach(const Session& session) const {
  return is_same_host(session.process, options_.process);
}

int64_t Server::tick(int64_t now_ns) {
  std::vector<std::shared_ptr<ServerConnection>> late;
  std::vector<std::shared_ptr<Listener>> resumed;
  int64_t next = std::numeric_limits<int64_t>::max();
  {
    const MutexLock lock(mutex_);
    if (paused_until_ns_ <= now_ns)
      resumed.swap(paused_);
    else if (!paused_.empty())
      next = paused_until_ns_;
    for (const auto& connection : connections_) {
      if (connection->is_ready()) continue;
      const int64_t due = connection->begin_ns() + options_.handshake_timeout_ns;
      if (due <= now_ns)
        late.push_back(connection);
      else
        next = std::min(next, due);
    }
  }
  for (const auto& listener : resumed)
    listener->loop()->modify(listener->key, listener->fd(), EPOLLIN);
  for (const auto& connection : late) {
    connection->shut({Code::kDeadline, "transfer.accept", "no handshake in time", ""});
    leave(*connection);
  }
  return next;
}

size_t Server::num_connections() const {
  const MutexLock lock(mutex_);
  return connections_.size();
}

void Server::fence(const std::vector<FenceDebt>& debts) {
  std::vector<std::shared_ptr<ServerConnection>> fenced;
  {
    const MutexLock lock(mutex_);
    for (const FenceDebt& debt : debts) {
      // A session is forgotten when its last connection is closed.
      const auto found = sessions_.find(debt.session);
      if (found == sessions_.end()) continue;
      const auto connection = found->second.connections.find(debt.connection);
      if (connection == found->second.connections.end()) continue;
      if (auto alive = connection->second.lock()) fenced.push_back(std::move(alive));
    }
  }
  for (const auto& connection : fenced) {
    connection->shut({Code::kConflict, "transfer.fence", "the peer left this path", ""});
    leave(*connection);
  }
}

Result<Grant> Server::grant(const std::string& session_id, uint64_t offset) {
  const MutexLock lock(mutex_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end() || !may_reach(found->second))
    return Error{Code::kUnsupported, "transfer.grant", "the peer is not on this host", ""};
  // Pin the buffer under mutex_, so that an unregister either refuses this pin or sees the grant.
  Result<Registry::Pin> pin = registry_->pin_remote(offset);
  if (!pin.is_ok()) return pin.error();
  const Registry::Entry& entry = pin.value().entry();
  Grant grant;
  grant.process = options_.process;
  grant.base = entry.base;
  grant.length = entry.spec.length;
  grant.can_read = entry.spec.can_remote_read;
  grant.can_write = entry.spec.can_remote_write && entry.spec.is_writable;
  grant.address = reinterpret_cast<uint64_t>(entry.spec.data);
  grant.cookie_address = reinterpret_cast<uint64_t>(cookie_.data());
  grant.cookie = cookie_;
  if (entry.spec.memory) {
    grant.fd = entry.spec.memory->fd();
    grant.device = entry.spec.memory->device();
    grant.inode = entry.spec.memory->inode();
    grant.is_sealed = true;
  } else if (entry.spec.file.fd >= 0) {
    grant.fd = entry.spec.file.fd;
    grant.device = entry.spec.file.device;
    grant.inode = entry.spec.file.inode;
    grant.file_offset = entry.spec.file.offset;
  }
  found->second.grants.insert(entry.base);
  return grant;
}

void Server::on_revoked(const std::string& session_id, uint64_t base) {
  const MutexLock lock(mutex_);
  const auto found = sessions_.find(session_id);
  if (found != sessions_.end()) found->second.grants.erase(base);
  changed_.notify_all();
}

Status Server::revoke(uint64_t base, int64_t deadline_ns) {
  MutexLock lock(mutex_);
  revoking_.insert(base);
  const std::set<std::shared_ptr<ServerConnection>> connections = connections_;
  lock.unlock();
  for (const auto& connection : connections) {
    if (connection->drop_buffer(base)) continue;
    connection->shut({Code::kNotFound, "transfer.unregister", "a buffer was unregistered", ""});
    leave(*connection);
  }
  lock.lock();
  std::string holder;
  std::vector<std::shared_ptr<ServerConnection>> to_ask;
  const auto is_free = [&]() REQUIRES(mutex_) {
    holder.clear();
    to_ask.clear();
    for (auto& [id, session] : sessions_) {
      if (!session.grants.contains(base)) continue;
      if (session.has_left || !is_alive(session.process)) {
        session.grants.erase(base);
        continue;
      }
      holder = session.name + " (pid " + std::to_string(session.process.pid) + ")";
      if (auto control = session.control.lock()) to_ask.push_back(std::move(control));
    }
    return holder.empty();
  };
  while (!is_free() && now_ns() < deadline_ns) {
    const std::vector<std::shared_ptr<ServerConnection>> asked = to_ask;
    lock.unlock();
    for (const auto& control : asked) {
      control->send({.type = FrameType::kRevoke, .offset = base});
      control->flush();
    }
    lock.lock();
    const int64_t until = std::min(deadline_ns, now_ns() + kAlivePollNs);
    changed_.wait_until(
        lock, std::chrono::steady_clock::time_point{std::chrono::nanoseconds(until)}, is_free);
  }
  if (!holder.empty())
    return {Code::kDeadline, "transfer.unregister",
            "peer " + holder + " has not let go of the buffer: it stays registered as closing; "
            "call again", "buffer"};
  revoking_.erase(base);
  return {};
}

uint8_t Server::accept_notification(const std::string& session_id, uint64_t sequence,
                                    Notification notification) {
  const MutexLock lock(mutex_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return wire_code(Code::kPeerLost);
  Session& session = found->second;
  // The peer sends one notification at a time, so a number seen before is a repetition of the last
  // one.
  if (sequence <= session.last_sequence) return session.last_outcome;
  session.last_sequence = sequence;
  session.last_outcome = 0;
  if (notifications_.size() >= options_.max_notifications) {
    session.last_outcome = wire_code(Code::kCapacity);
  } else {
    notification.peer = session.name;
    notifications_.push_back(std::move(notification));
    changed_.notify_all();
  }
  return session.last_outcome;
}

std::vector<Notification> Server::take_notifications(int64_t deadline_ns) {
  MutexLock lock(mutex_);
  changed_.wait_until(lock,
                      std::chrono::steady_clock::time_point{std::chrono::nanoseconds(deadline_ns)},
                      [&]() REQUIRES(mutex_) { return is_closed_ || !notifications_.empty(); });
  return std::exchange(notifications_, {});
}

void Server::on_bye(const std::string& session_id) {
  const MutexLock lock(mutex_);
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return;
  found->second.has_left = true;
  found->second.grants.clear();
  changed_.notify_all();
}

Description Server::describe(const ServerConnection& connection) const {
  Description description;
  description.name = options_.name;
  description.addresses = options_.advertise;
  if (description.addresses.empty()) {
    description.addresses = addresses_;
    // Replace a wildcard address by the address that the peer connected to, since a wildcard is
    // useless to the peer.
    for (std::string& address : description.addresses) {
      Result<SocketAddress> parsed = parse_address(address);
      if (!parsed.is_ok() || !parsed.value().is_wildcard()) continue;
      SocketAddress reached = connection.local_address();
      if (reached.size == 0) continue;
      reached.set_port(parsed.value().port());
      address = reached.text();
    }
  }
  description.buffers = registry_->describe();
  // The description must fit in one frame. Buffers that are left out can still be reached by
  // offset.
  size_t size = 0;
  size_t num_described = 0;
  for (const BufferInfo& buffer : description.buffers) {
    size += 32 + buffer.name.size() + buffer.location.size();
    if (size > kMaxControlBytes / 2) break;
    ++num_described;
  }
  description.buffers.resize(num_described);
  return description;
}

}  // namespace tandem::transfer
