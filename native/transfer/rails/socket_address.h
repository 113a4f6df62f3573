// Conversion of "host:port" and "[v6]:port" to and from socket addresses; listening and connecting
// sockets.
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
  // True if both addresses are equal except for the port.
  bool is_same_host(const SocketAddress& other) const;
  bool is_loopback() const;
  std::string text() const;
  // Number of leading bits that the hosts have in common; 0 for different families.
  int common_bits(const SocketAddress& other) const;
};

// Parses an address and resolves its host name (may ask DNS, blocks). Errors: kConfig (malformed),
// kNotFound (no such host).
Result<SocketAddress> parse_address(const std::string& text);
// Address and ports to listen on, from the text "host:port", or "host:first-last" for the first
// free port of a range.
struct PortRange {
  SocketAddress address;  // With the first port.
  uint16_t last_port = 0;
};
Result<PortRange> parse_port_range(const std::string& text);
// Parses a host without a port, as for a local end.
Result<SocketAddress> parse_host(const std::string& host);

// Returns a non-blocking, close-on-exec listening socket. Errors: kConflict (address in use),
// kConfig.
Result<int> listen_on(const SocketAddress& address);
// Begins to connect; the socket becomes writable when that has ended. `local` may be empty. Errors:
// kPeerLost (refused at once), kConfig (the local address is not of this host).
Result<int> begin_connect(const SocketAddress& remote, const SocketAddress& local);
// Returns name and address (without a port) of each interface that has an address.
std::vector<std::pair<std::string, std::string>> list_interfaces();
// True if a connection between these stays in this host's kernel: the remote end is a loopback
// address or the local end's.
bool stays_on_host(const SocketAddress& remote, const SocketAddress& local);
// Sets socket options for small frames that are awaited and large ones that follow each other.
// `remote`: the other end.
void tune_stream(int fd, const SocketAddress& remote, int buffer_bytes);
// Makes the socket abort on close: when it is closed, by this process or because it dies, unsent
// data is discarded, and the other end is told at once (RST), whatever it has not read.
void abort_on_close(int fd);
SocketAddress local_address_of(int fd);
// The other host's acknowledgements: whether its kernel owes some, and when it was last heard. It
// acknowledges at once, however busy its processes are.
struct HostLife {
  bool owes = false;     // More than it may keep back for a while.
  int64_t heard_ns = 0;  // To a few milliseconds.
};
HostLife host_life_of(int fd, int64_t now_ns);
// Returns the remote address; empty before the socket is connected.
SocketAddress remote_address_of(int fd);

}  // namespace tandem::transfer
