#include "transfer/loop/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "transfer/loop/adaptive_spin.h"

namespace tandem::transfer {
namespace {

// Keys of handlers are above these; their lowest bit is the kind of the handler.
constexpr uint64_t kBellKey = 0;
constexpr uint64_t kLeaderBellKey = 1;
constexpr uint64_t kAnswersKey = 2;
constexpr uint64_t kFirstKey = 4;

Error fail_start(const char* call) {
  return {Code::kCapacity, "transfer.start", describe_errno(call, errno), ""};
}

bool add_to(int epoll_fd, int fd, uint64_t key) {
  epoll_event event{EPOLLIN, {.u64 = key}};
  return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::start(int64_t spin_ns) {
  std::unique_ptr<EventLoop> loop(new EventLoop(spin_ns));
  if (loop->requests_fd_ < 0 || loop->answers_fd_ < 0) return fail_start("epoll_create1");
  if (loop->bell_fd_ < 0 || loop->leader_bell_fd_ < 0) return fail_start("eventfd");
  if (!add_to(loop->requests_fd_, loop->bell_fd_, kBellKey) ||
      !add_to(loop->requests_fd_, loop->answers_fd_, kAnswersKey) ||
      !add_to(loop->answers_fd_, loop->leader_bell_fd_, kLeaderBellKey))
    return fail_start("epoll_ctl");
  try {
    loop->thread_ = std::thread([raw = loop.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return Error{Code::kCapacity, "transfer.start", std::string("no thread: ") + error.what(), ""};
  }
  pthread_setname_np(loop->thread_.native_handle(), "tandem-transfer");
  return loop;
}

EventLoop::EventLoop(int64_t spin_ns)
    : requests_fd_(epoll_create1(EPOLL_CLOEXEC)),
      answers_fd_(epoll_create1(EPOLL_CLOEXEC)),
      bell_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      leader_bell_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spin_ns_(spin_ns),
      next_key_(kFirstKey) {}

EventLoop::~EventLoop() {
  is_stopping_.store(true);
  if (bell_fd_ >= 0) eventfd_write(bell_fd_, 1);
  if (thread_.joinable()) thread_.join();
  for (const int fd : {requests_fd_, answers_fd_, bell_fd_, leader_bell_fd_})
    if (fd >= 0) close(fd);
}

int EventLoop::epoll_fd_of(uint64_t key) const {
  return key % 2 == 0 ? requests_fd_ : answers_fd_;
}

Result<uint64_t> EventLoop::add(int fd, uint32_t events, std::weak_ptr<EventHandler> handler,
                                Kind kind) {
  uint64_t key;
  {
    const MutexLock lock(mutex_);
    key = next_key_ + (kind == Kind::kAnswers ? 1 : 0);
    next_key_ += 2;
    handlers_.emplace(key, std::move(handler));
  }
  epoll_event event{events, {.u64 = key}};
  if (epoll_ctl(epoll_fd_of(key), EPOLL_CTL_ADD, fd, &event) != 0) {
    const Error error = fail_start("epoll_ctl");
    const MutexLock lock(mutex_);
    handlers_.erase(key);
    return error;
  }
  return key;
}

void EventLoop::modify(uint64_t key, int fd, uint32_t events) {
  epoll_event event{events, {.u64 = key}};
  epoll_ctl(epoll_fd_of(key), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::remove(uint64_t key, int fd) {
  epoll_ctl(epoll_fd_of(key), EPOLL_CTL_DEL, fd, nullptr);
  const MutexLock lock(mutex_);
  handlers_.erase(key);
}

bool EventLoop::run_once(int epoll_fd, int timeout_ms, Role role) {
  constexpr int kMaxEvents = 32;
  epoll_event events[kMaxEvents];
  const int count = epoll_wait(epoll_fd, events, kMaxEvents, timeout_ms);
  if (role == Role::kLeader) is_leader_asleep_.store(false, std::memory_order_relaxed);
  bool was_any = false;
  for (int i = 0; i < count; ++i) was_any |= dispatch(events[i].data.u64, events[i].events, role);
  return was_any;
}

bool EventLoop::dispatch(uint64_t key, uint32_t events, Role role) {
  eventfd_t num_rings;
  if (key == kBellKey) {
    if (role != Role::kThread) return false;
    eventfd_read(bell_fd_, &num_rings);
    return true;
  }
  if (key == kLeaderBellKey) {
    // Reset the bell, or it would stay readable when no thread leads.
    eventfd_read(leader_bell_fd_, &num_rings);
    if (role != Role::kLeader && is_leader_asleep_.load()) eventfd_write(leader_bell_fd_, 1);
    return true;
  }
  // While a thread leads, it handles the answers.
  if (key == kAnswersKey) return !is_led_.load() && run_once(answers_fd_, 0, role);
  std::shared_ptr<EventHandler> handler;
  {
    const MutexLock lock(mutex_);
    const auto found = handlers_.find(key);
    if (found != handlers_.end()) handler = found->second.lock();
  }
  if (handler) handler->on_events(events);
  return true;
}

// --- Leading --------------------------------------------------------------------------------------

bool EventLoop::begin_lead() {
  const MutexLock lock(gate_mutex_);
  if (is_led_.load(std::memory_order_relaxed)) return false;
  is_led_.store(true);
  led_since_ns_ = now_ns();
  if (!is_gate_open_) return true;
  is_gate_open_ = false;
  epoll_event shut{0, {.u64 = kAnswersKey}};
  epoll_ctl(requests_fd_, EPOLL_CTL_MOD, answers_fd_, &shut);
  return true;
}

void EventLoop::end_lead() {
  const MutexLock lock(gate_mutex_);
  const int64_t now = now_ns();
  const bool was_short = now - led_since_ns_ < kHoldNs;
  const bool is_frequent = led_since_ns_ - led_until_ns_ < kHoldNs;
  led_until_ns_ = now;
  is_led_.store(false);
  // During a long wait the woken thread costs nothing, and if waits are rare the clock checks would
  // cost more.
  if (!was_short || !is_frequent || num_followers_.load() > 0) return open_gate();
  if (is_gate_watched_) return;
  is_gate_watched_ = true;
  eventfd_write(bell_fd_, 1);  // The thread sleeps without a limit now.
}

void EventLoop::open_gate() {
  is_gate_watched_ = false;
  if (is_gate_open_) return;
  is_gate_open_ = true;
  epoll_event open{EPOLLIN, {.u64 = kAnswersKey}};
  epoll_ctl(requests_fd_, EPOLL_CTL_MOD, answers_fd_, &open);
}

void EventLoop::begin_follow() {
  num_followers_.fetch_add(1);
  const MutexLock lock(gate_mutex_);
  // A leader checks at its end whether there is a follower.
  if (!is_led_.load()) open_gate();
}

int EventLoop::watch_gate() {
  const MutexLock lock(gate_mutex_);
  if (!is_gate_watched_) return -1;
  const int64_t now = now_ns();
  // A leader that stays opens the gate itself.
  if (is_led_.load()) return to_timeout_ms(std::max(kHoldNs, now - led_since_ns_));
  const int64_t left_ns = led_until_ns_ + kHoldNs - now;
  if (left_ns > 0) return to_timeout_ms(left_ns);
  open_gate();
  return -1;
}

void EventLoop::wake_leader() {
  if (is_leader_asleep_.load()) eventfd_write(leader_bell_fd_, 1);
}

int EventLoop::to_timeout_ms(int64_t ns) {
  // Round up; a far deadline is checked again every second.
  constexpr int64_t kNsPerMs = 1'000'000, kMaxMs = 1000;
  return static_cast<int>(std::min(ns / kNsPerMs + 1, kMaxMs));
}

void EventLoop::run() {
  AdaptiveSpin spin(spin_ns_);
  bool was_busy = false;
  while (!is_stopping_.load()) {
    was_busy = was_busy && spin.wait([&] {
      return run_once(requests_fd_, 0, Role::kThread) || is_stopping_.load();
    });
    if (was_busy) continue;
    was_busy = run_once(requests_fd_, watch_gate(), Role::kThread);
    if (was_busy) spin.came();
  }
}

}  // namespace tandem::transfer
