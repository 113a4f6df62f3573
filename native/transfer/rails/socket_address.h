// "host:port" and "[v6]:port" to and from socket addresses; listening and connecting sockets.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tandem::transfer {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  uint16_t port() const;
  void set_port(uint16_t port);
  bool is_wildcard() const;
  // Whether both are of one interface: equal but for the port.
  bool is_same_host(const SocketAddress& other) const;
  bool is_loopback() const;
  std::string text() const;
  // Leading bits that the hosts have in common; 0 for different families.
  int common_bits(const SocketAddress& other) const;
};

// Resolves names (may ask DNS, blocks). Errors: kConfig (malformed), kNotFound (no such host).
Result<SocketAddress> parse_address(const std::string& text);
// "host:port" or "host:first-last", for listening on the first port that is free.
struct PortRange {
  SocketAddress address;  // With the first port.
  uint16_t last_port = 0;
};
Result<PortRange> parse_port_range(const std::string& text);
// Address alone, without a port, as for a local end.
Result<SocketAddress> parse_host(const std::string& host);

// Non-blocking, close-on-exec. Errors: kConflict (address in use), kConfig.
Result<int> listen_on(const SocketAddress& address);
// Begins to connect; the socket is writable once that has ended. `local` may be empty.
// Errors: kPeerLost (refused at once), kConfig (the local address is none of ours).
Result<int> begin_connect(const SocketAddress& remote, const SocketAddress& local);
// Name and address (without a port) of each interface that has one.
std::vector<std::pair<std::string, std::string>> list_interfaces();
// A connection between these stays in the kernel of this host: the remote end is a loopback address,
// or that of the local end.
bool stays_on_host(const SocketAddress& remote, const SocketAddress& local);
// For small frames that are awaited and large ones that follow each other. `remote`: the other end.
void tune_stream(int fd, const SocketAddress& remote, int buffer_bytes);
// When it is closed, by us or because this process dies, what was not sent yet is thrown away, and the
// other end is told at once (RST), whatever lies unread there.
void abort_on_close(int fd);
SocketAddress local_address_of(int fd);
// What the other host's kernel owes us and when it was last heard of; it acknowledges at once, however
// busy its processes are.
struct HostLife {
  bool owes = false;     // More than it may keep back for a while.
  int64_t heard_ns = 0;  // To a few milliseconds.
};
HostLife host_life_of(int fd, int64_t now_ns);
// Empty where it is not connected yet.
SocketAddress remote_address_of(int fd);

}  // namespace tandem::transfer
