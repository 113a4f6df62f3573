#include "transfer/rails/socket_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/machine/sysfs.h"

namespace tandem::transfer {
namespace {

Result<SocketAddress> resolve(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int refused = getaddrinfo(host.c_str(), port.empty() ? nullptr : port.c_str(), &hints,
                                  &found);
  if (refused != 0)
    return Error{Code::kNotFound, "transfer.resolve",
                 "host '" + host + "': " + gai_strerror(refused), "address"};
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

class OwnedSocket {
 public:
  explicit OwnedSocket(int fd) : fd_(fd) {}
  ~OwnedSocket() {
    if (fd_ >= 0) close(fd_);
  }
  OwnedSocket(const OwnedSocket&) = delete;
  OwnedSocket& operator=(const OwnedSocket&) = delete;
  int get() const { return fd_; }
  int take() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

}  // namespace

uint16_t SocketAddress::port() const {
  if (storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

void SocketAddress::set_port(uint16_t port) {
  if (storage.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = htons(port);
  else
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
}

bool SocketAddress::is_wildcard() const {
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == INADDR_ANY;
}

bool SocketAddress::is_same_host(const SocketAddress& other) const {
  if (storage.ss_family != other.storage.ss_family) return false;
  if (storage.ss_family == AF_INET6)
    return IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr,
                              &reinterpret_cast<const sockaddr_in6*>(&other.storage)->sin6_addr);
  return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr ==
         reinterpret_cast<const sockaddr_in*>(&other.storage)->sin_addr.s_addr;
}

bool SocketAddress::is_loopback() const {
  constexpr uint32_t kNetwork = 127;
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  return storage.ss_family == AF_INET &&
         ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr) >> 24 == kNetwork;
}

int SocketAddress::common_bits(const SocketAddress& other) const {
  if (storage.ss_family != other.storage.ss_family) return 0;
  const bool is_v6 = storage.ss_family == AF_INET6;
  const auto bytes_of = [&](const SocketAddress& address) {
    return is_v6 ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr.s6_addr
                 : reinterpret_cast<const uint8_t*>(
                       &reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr);
  };
  const uint8_t* a = bytes_of(*this);
  const uint8_t* b = bytes_of(other);
  int bits = 0;
  for (int i = 0; i < (is_v6 ? 16 : 4); ++i) {
    if (a[i] == b[i]) {
      bits += 8;
      continue;
    }
    return bits + std::countl_zero(static_cast<uint8_t>(a[i] ^ b[i]));
  }
  return bits;
}

std::string SocketAddress::text() const {
  char host[NI_MAXHOST] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&storage), size, host, sizeof host, nullptr, 0,
              NI_NUMERICHOST);
  const std::string name(host);
  const bool is_v6 = storage.ss_family == AF_INET6;
  return (is_v6 ? "[" + name + "]" : name) + ":" + std::to_string(port());
}

Result<SocketAddress> parse_address(const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string host = colon == std::string::npos ? "" : text.substr(0, colon);
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  const std::optional<int64_t> number = parse_int(port);
  const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (is_bracketed) host = host.substr(1, host.size() - 2);
  const bool is_bare_v6 = !is_bracketed && host.find(':') != std::string::npos;
  if (host.empty() || is_bare_v6 || !number || *number < 0 || *number > 65535)
    return Error{Code::kConfig, "transfer.parse",
                 "'" + text + "' is no address: write host:port or [v6]:port", "address"};
  return resolve(host, port);
}

Result<PortRange> parse_port_range(const std::string& text) {
  const size_t colon = text.rfind(':');
  const size_t dash = text.rfind('-');
  // A dash in the host name is not a port range.
  const bool is_range = colon != std::string::npos && dash != std::string::npos && dash > colon;
  Result<SocketAddress> address = parse_address(is_range ? text.substr(0, dash) : text);
  if (!address.is_ok()) return address.error();
  const uint16_t first = address.value().port();
  if (!is_range) return PortRange{address.value(), first};
  const std::optional<int64_t> last = parse_int(text.substr(dash + 1));
  if (!last || first == 0 || *last < first || *last > 65535)
    return Error{Code::kConfig, "transfer.parse",
                 "'" + text + "' is no range of ports: write host:first-last", "listen"};
  return PortRange{address.value(), static_cast<uint16_t>(*last)};
}

Result<SocketAddress> parse_host(const std::string& host) { return resolve(host, ""); }

Result<int> listen_on(const SocketAddress& address) {
  OwnedSocket fd(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  const auto* raw = reinterpret_cast<const sockaddr*>(&address.storage);
  constexpr int kBacklog = 256;
  if (fd.get() < 0 || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd.get(), raw, address.size) != 0 || listen(fd.get(), kBacklog) != 0)
    return Error{errno == EADDRINUSE ? Code::kConflict : Code::kConfig, "transfer.listen",
                 address.text() + ": " + describe_errno("listen", errno), "listen"};
  return fd.take();
}

Result<int> begin_connect(const SocketAddress& remote, const SocketAddress& local) {
  OwnedSocket fd(socket(remote.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0)
    return Error{Code::kCapacity, "transfer.connect", describe_errno("socket", errno), ""};
  if (local.size > 0 &&
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&local.storage), local.size) != 0)
    return Error{Code::kConfig, "transfer.connect",
                 local.text() + ": " + describe_errno("bind", errno), "local_addresses"};
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&remote.storage), remote.size) != 0 &&
      errno != EINPROGRESS)
    return Error{Code::kPeerLost, "transfer.connect",
                 remote.text() + ": " + describe_errno("connect", errno), ""};
  return fd.take();
}

bool stays_on_host(const SocketAddress& remote, const SocketAddress& local) {
  return remote.is_loopback() || remote.is_same_host(local);
}

void tune_stream(int fd, const SocketAddress& remote, int buffer_bytes) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Use Reno within a host, where nothing is congested. A congestion control that paces (BBR)
  // halves the rate there: it estimates a bandwidth from memory copies, sends small parts and
  // pauses for its own probes. Every kernel has Reno. Between hosts the administrator's choice
  // stays.
  if (stays_on_host(remote, local_address_of(fd))) {
    constexpr std::string_view kUnpaced = "reno";
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
  }
  // 0 keeps the kernel's own tuning, which a fixed size would turn off.
  if (buffer_bytes > 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
  }
}

void abort_on_close(int fd) {
  const linger none{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

SocketAddress local_address_of(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size);
  return address;
}

HostLife host_life_of(int fd, int64_t now_ns) {
  // A kernel may delay the acknowledgement of two segments, for 40 ms and more.
  constexpr uint32_t kMaxDelayed = 2;
  constexpr int64_t kNsPerMs = 1'000'000;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return {info.tcpi_unacked > kMaxDelayed, now_ns - info.tcpi_last_ack_recv * kNsPerMs};
}

SocketAddress remote_address_of(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0)
    return {};
  return address;
}

std::vector<std::pair<std::string, std::string>> list_interfaces() {
  std::vector<std::pair<std::string, std::string>> found;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char host[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(one->ifa_addr, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    const std::string text(host);
    // A link-local address contains its interface: fe80::1%eth0.
    found.emplace_back(one->ifa_name, text.substr(0, text.find('%')));
  }
  freeifaddrs(all);
  return found;
}

}  // namespace tandem::transfer
