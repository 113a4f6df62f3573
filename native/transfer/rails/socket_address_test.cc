// Goal: a stream within the host is not paced, one to another host follows the administrator's
// choice. Method: real loopback sockets, and their options as the kernel reports them.
#include "transfer/rails/socket_address.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <array>
#include <string>

#include "base/test.h"

namespace tandem::transfer {
namespace {

std::string congestion_control_of(int fd) {
  std::array<char, 16> name{};
  socklen_t size = name.size();
  CHECK(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) == 0);
  return name.data();
}

TEST(loopback_is_the_whole_network_of_either_family) {
  for (const char* text : {"127.0.0.1:1", "127.5.6.7:1", "[::1]:1"})
    CHECK(parse_address(text).value().is_loopback());
  for (const char* text : {"192.0.2.1:1", "0.0.0.0:1", "[::]:1", "[2001:db8::1]:1"})
    CHECK(!parse_address(text).value().is_loopback());
}

TEST(stream_inside_the_host_is_not_paced) {
  const int listener = listen_on(parse_address("127.0.0.1:0").value()).value();
  const SocketAddress remote = local_address_of(listener);
  const int fd = begin_connect(remote, {}).value();
  tune_stream(fd, remote, 0);
  CHECK(congestion_control_of(fd) == "reno");
  CHECK(remote_address_of(fd).is_same_host(remote));
  CHECK(remote_address_of(listener).size == 0);
  close(fd);
  close(listener);
}

TEST(host_owes_what_it_has_not_acknowledged) {
  const int listener = listen_on(parse_address("127.0.0.1:0").value()).value();
  const int fd = begin_connect(local_address_of(listener), {}).value();
  constexpr int64_t kNow = 1'000'000'000'000;
  // On loopback a kernel acknowledges before the call has returned.
  const std::string bytes(100'000, 'x');
  CHECK(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
  const HostLife life = host_life_of(fd, kNow);
  CHECK(!life.owes);
  CHECK(life.heard_ns > kNow - 60'000'000'000 && life.heard_ns <= kNow);
  // A descriptor that is no stream has no known state.
  CHECK(!host_life_of(-1, kNow).owes);
  close(fd);
  close(listener);
}

TEST(stream_to_another_host_keeps_the_control_of_the_system) {
  const int fd = listen_on(parse_address("127.0.0.1:0").value()).value();
  const std::string usual = congestion_control_of(fd);
  // If the system's default is Reno too, set another control first, to tell the two apart.
  const std::string other = "cubic";
  const bool is_set =
      setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other.data(), other.size()) == 0;
  tune_stream(fd, parse_address("192.0.2.1:1").value(), 0);
  CHECK(congestion_control_of(fd) == (is_set ? other : usual));
  close(fd);
}

}  // namespace
}  // namespace tandem::transfer
