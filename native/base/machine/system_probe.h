// Optional services of the kernel: tried, not guessed from a version number.
#pragma once

#include <string>

namespace tandem {

struct ProbeResult {
  bool is_available = false;
  std::string detail;  // What was found, or why it is not usable.
};

// Sets up a ring of one entry and closes it.
ProbeResult probe_io_uring();

// Reads this process's own memory by process_vm_readv (cross-memory attach, "CMA"); between two
// processes the kernel asks for more, which the detail tells (Yama's ptrace_scope).
ProbeResult probe_cma();

}  // namespace tandem
