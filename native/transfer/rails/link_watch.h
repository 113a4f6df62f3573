// Notices by kernel messages when a network interface goes down or returns; TCP notices it only by
// silence.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/loop/event_loop.h"
#include "transfer/rails/socket_address.h"

namespace tandem::transfer {

class LinkWatch : public EventHandler {
 public:
  // Called by the event loop with the addresses of the interface.
  using OnChange = std::function<void(const std::vector<SocketAddress>&, bool is_up)>;

  // Returns null if the kernel refuses (a sandbox without netlink); a lost link is then noticed by
  // silence.
  static std::shared_ptr<LinkWatch> start(EventLoop* loop, OnChange on_change);
  ~LinkWatch() override;
  LinkWatch(const LinkWatch&) = delete;
  LinkWatch& operator=(const LinkWatch&) = delete;

  // Ends the watch. Nothing is called afterwards, except a call that is running.
  void stop();
  void on_events(uint32_t events) override;

 private:
  LinkWatch(EventLoop* loop, int fd, OnChange on_change);
  void on_link(int index, bool is_up);

  EventLoop* const loop_;
  const int fd_;
  const OnChange on_change_;
  uint64_t key_ = 0;
  Mutex mutex_;                                     // Leaf.
  std::map<int, bool> is_up_ GUARDED_BY(mutex_);  // By interface.
  std::map<int, std::vector<SocketAddress>> addresses_ GUARDED_BY(mutex_);
};

}  // namespace tandem::transfer
