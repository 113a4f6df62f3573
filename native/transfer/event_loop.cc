#include "transfer/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "transfer/adaptive_spin.h"

namespace tandem::transfer {
namespace {

constexpr uint64_t kStopKey = 0;

Error fail_start(const char* call) {
  return {Code::kCapacity, "transfer.start", describe_errno(call, errno), ""};
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::start(int64_t spin_ns) {
  const int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd < 0) return fail_start("epoll_create1");
  const int stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {.u64 = kStopKey}};
  if (stop_fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, stop_fd, &event) != 0) {
    const Error error = fail_start("eventfd");
    close(epoll_fd);
    if (stop_fd >= 0) close(stop_fd);
    return error;
  }
  std::unique_ptr<EventLoop> loop(new EventLoop(epoll_fd, stop_fd, spin_ns));
  try {
    loop->thread_ = std::thread([raw = loop.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return Error{Code::kCapacity, "transfer.start", std::string("no thread: ") + error.what(), ""};
  }
  pthread_setname_np(loop->thread_.native_handle(), "tandem-transfer");
  return loop;
}

EventLoop::EventLoop(int epoll_fd, int stop_fd, int64_t spin_ns)
    : epoll_fd_(epoll_fd), stop_fd_(stop_fd), spin_ns_(spin_ns) {}

EventLoop::~EventLoop() {
  is_stopping_.store(true);
  eventfd_write(stop_fd_, 1);
  if (thread_.joinable()) thread_.join();
  close(epoll_fd_);
  close(stop_fd_);
}

Result<uint64_t> EventLoop::add(int fd, uint32_t events, std::weak_ptr<EventHandler> handler) {
  uint64_t key;
  {
    const std::lock_guard lock(mutex_);
    key = next_key_++;
    handlers_.emplace(key, std::move(handler));
  }
  epoll_event event{events, {.u64 = key}};
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    const Error error = fail_start("epoll_ctl");
    const std::lock_guard lock(mutex_);
    handlers_.erase(key);
    return error;
  }
  return key;
}

void EventLoop::modify(uint64_t key, int fd, uint32_t events) {
  epoll_event event{events, {.u64 = key}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::remove(uint64_t key, int fd) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  const std::lock_guard lock(mutex_);
  handlers_.erase(key);
}

bool EventLoop::run_once(int timeout_ms) {
  constexpr int kMaxEvents = 32;
  epoll_event events[kMaxEvents];
  const int count = epoll_wait(epoll_fd_, events, kMaxEvents, timeout_ms);
  for (int i = 0; i < count; ++i) {
    std::shared_ptr<EventHandler> handler;
    {
      const std::lock_guard lock(mutex_);
      const auto found = handlers_.find(events[i].data.u64);
      if (found != handlers_.end()) handler = found->second.lock();
    }
    if (handler) handler->on_events(events[i].events);
  }
  return count > 0;
}

void EventLoop::run() {
  AdaptiveSpin spin(spin_ns_);
  bool was_busy = false;
  while (!is_stopping_.load()) {
    // A helper that polls does it for both; two pollers would only take the core from the peer.
    const bool may_spin = was_busy && num_helpers_.load(std::memory_order_relaxed) == 0;
    was_busy = may_spin && spin.wait([&] { return run_once(0) || is_stopping_.load(); });
    if (!was_busy) was_busy = run_once(-1);
  }
}

}  // namespace tandem::transfer
