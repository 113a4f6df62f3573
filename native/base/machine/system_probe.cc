#include "base/machine/system_probe.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/status.h"
#include "base/machine/sysfs.h"

namespace tandem {
namespace {

// Number of the system call io_uring_setup, from linux/io_uring.h, which older distributions lack;
// it is part of the kernel's ABI.
constexpr long kIoUringSetup = 425;
constexpr size_t kIoUringParamsBytes = 120;

std::string explain_io_uring_error(int error_number) {
  const std::string text = describe_errno("io_uring_setup", error_number);
  if (error_number == ENOSYS) return text + ": the kernel has no io_uring, or a sandbox hides it";
  if (error_number != EPERM) return text;
  const auto disabled = Root().read_int("/proc/sys/kernel/io_uring_disabled");
  if (disabled.value_or(0) != 0)
    return text + ": kernel.io_uring_disabled is " + std::to_string(*disabled);
  return text + ": refused by a security filter (seccomp) of the container";
}

}  // namespace

ProbeResult probe_io_uring() {
  alignas(8) uint8_t params[kIoUringParamsBytes] = {};
  const long fd = syscall(kIoUringSetup, 1, params);
  if (fd < 0) return {false, explain_io_uring_error(errno)};
  close(static_cast<int>(fd));
  return {true, "io_uring_setup succeeded"};
}

ProbeResult probe_cma() {
  const uint64_t cookie = 0x74616e64656d2131;
  uint64_t copy = 0;
  iovec local{&copy, sizeof copy};
  iovec remote{const_cast<uint64_t*>(&cookie), sizeof cookie};
  const ssize_t size = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  if (size < 0) return {false, describe_errno("process_vm_readv", errno)};
  if (size != sizeof cookie || copy != cookie)
    return {false, "process_vm_readv returned other bytes than were there"};
  const auto scope = Root().read_int("/proc/sys/kernel/yama/ptrace_scope");
  if (!scope || *scope == 0) return {true, "between processes of one user"};
  if (*scope == 1) return {true, "ptrace_scope 1: only a peer that names us by PR_SET_PTRACER"};
  return {true, "ptrace_scope " + std::to_string(*scope) + ": only with CAP_SYS_PTRACE"};
}

}  // namespace tandem
