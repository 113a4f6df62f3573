#include "transfer/rails/link_watch.h"

#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace tandem::transfer {
namespace {

std::vector<SocketAddress> addresses_of(int index) {
  std::vector<SocketAddress> found;
  char name[IF_NAMESIZE];
  ifaddrs* all = nullptr;
  if (if_indextoname(static_cast<unsigned>(index), name) == nullptr || getifaddrs(&all) != 0)
    return found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || std::strcmp(one->ifa_name, name) != 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    SocketAddress address;
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, one->ifa_addr, address.size);
    found.push_back(address);
  }
  freeifaddrs(all);
  return found;
}

}  // namespace

std::shared_ptr<LinkWatch> LinkWatch::start(EventLoop* loop, OnChange on_change) {
  const int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
  if (fd < 0) return nullptr;
  sockaddr_nl address{};
  address.nl_family = AF_NETLINK;
  address.nl_groups = RTMGRP_LINK;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    close(fd);
    return nullptr;
  }
  std::shared_ptr<LinkWatch> watch(new LinkWatch(loop, fd, std::move(on_change)));
  // Read the addresses before the first event, because an interface that vanishes takes its
  // addresses with it.
  if (struct if_nameindex* all = if_nameindex()) {
    const MutexLock lock(watch->mutex_);
    for (const struct if_nameindex* one = all; one->if_index != 0; ++one)
      watch->addresses_[static_cast<int>(one->if_index)] =
          addresses_of(static_cast<int>(one->if_index));
    if_freenameindex(all);
  }
  Result<uint64_t> key = loop->add(fd, EPOLLIN, watch, EventLoop::Kind::kRequests);
  if (!key.is_ok()) return nullptr;
  watch->key_ = key.value();
  return watch;
}

LinkWatch::LinkWatch(EventLoop* loop, int fd, OnChange on_change)
    : loop_(loop), fd_(fd), on_change_(std::move(on_change)) {}

LinkWatch::~LinkWatch() { close(fd_); }

void LinkWatch::stop() { loop_->remove(key_, fd_); }

void LinkWatch::on_events(uint32_t) {
  alignas(nlmsghdr) char buffer[16 << 10];
  // A waiter may poll the loop at the same time; each handles the messages that it has read.
  for (ssize_t got; (got = recv(fd_, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;) {
    size_t left = static_cast<size_t>(got);
    for (const nlmsghdr* head = reinterpret_cast<nlmsghdr*>(buffer); NLMSG_OK(head, left);
         head = NLMSG_NEXT(head, left)) {
      if (head->nlmsg_type != RTM_NEWLINK && head->nlmsg_type != RTM_DELLINK) continue;
      if (head->nlmsg_len < NLMSG_LENGTH(sizeof(ifinfomsg))) continue;
      const auto* info = static_cast<const ifinfomsg*>(NLMSG_DATA(head));
      constexpr unsigned kCarries = IFF_UP | IFF_RUNNING;
      on_link(info->ifi_index, head->nlmsg_type == RTM_NEWLINK &&
                                   (info->ifi_flags & kCarries) == kCarries);
    }
  }
}

void LinkWatch::on_link(int index, bool is_up) {
  std::vector<SocketAddress> addresses;
  {
    const MutexLock lock(mutex_);
    std::vector<SocketAddress> now = addresses_of(index);
    if (!now.empty()) addresses_[index] = std::move(now);
    const auto [known, is_new] = is_up_.emplace(index, is_up);
    if (!is_new && known->second == is_up) return;  // Something else has changed.
    known->second = is_up;
    addresses = addresses_[index];
  }
  if (!addresses.empty()) on_change_(addresses, is_up);
}

}  // namespace tandem::transfer
