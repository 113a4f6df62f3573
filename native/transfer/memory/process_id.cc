#include "transfer/memory/process_id.h"

#include <sys/random.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <optional>

#include "base/machine/sysfs.h"

namespace tandem::transfer {
namespace {

std::optional<std::string> read_stat(uint32_t pid) {
  return Root().read_text("/proc/" + std::to_string(pid) + "/stat");
}

// Field 22 of /proc/PID/stat of a live process. The second field is the command's name, which may
// contain anything.
std::optional<uint64_t> parse_start_time(std::string_view text) {
  const size_t close = text.rfind(')');
  if (close == std::string::npos || close + 2 > text.size()) return std::nullopt;
  const std::vector<std::string> fields = split(text.substr(close + 2), ' ');
  constexpr size_t kStartTime = 22 - 3;
  if (fields.size() <= kStartTime || fields[0] == "Z" || fields[0] == "X") return std::nullopt;
  return static_cast<uint64_t>(parse_int(fields[kStartTime]).value_or(0));
}

}  // namespace

ProcessId read_own_process() {
  ProcessId process;
  process.pid = static_cast<uint32_t>(getpid());
  const auto stat = read_stat(process.pid);
  process.start_time = stat ? parse_start_time(*stat).value_or(0) : 0;
  const auto boot = Root().read_text("/proc/sys/kernel/random/boot_id");
  char space[64];
  const ssize_t size = readlink("/proc/self/ns/pid", space, sizeof space);
  if (boot && size > 0 && process.start_time != 0)
    process.host_id = *boot + " " + std::string(space, static_cast<size_t>(size));
  return process;
}

bool is_same_host(const ProcessId& a, const ProcessId& b) {
  return !a.host_id.empty() && a.host_id == b.host_id;
}

bool is_alive(const ProcessId& process) {
  const auto stat = read_stat(process.pid);
  if (stat) return parse_start_time(*stat) == process.start_time;
  // Use kill: an unreadable /proc is no proof of death, since no descriptor may be left, and kill
  // needs none.
  if (process.pid == 0 || process.pid > INT_MAX) return false;
  return kill(static_cast<pid_t>(process.pid), 0) == 0 || errno != ESRCH;
}

std::string random_bytes(size_t size) {
  std::string bytes(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t got = getrandom(bytes.data() + done, size - done, 0);
    // Abort: without randomness there is no proof and no session, and zeros would be insecure.
    if (got <= 0) abort();
    done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace tandem::transfer
