// Detection of optional services of the kernel, by trying them instead of comparing version
// numbers.
#pragma once

#include <string>

namespace tandem {

struct ProbeResult {
  bool is_available = false;
  std::string detail;  // What was found, or why it is not usable.
};

// Tries io_uring: sets up a ring of one entry and closes it.
ProbeResult probe_io_uring();

// Tries cross-memory attach ("CMA"): reads this process's own memory by process_vm_readv. Between
// two processes the kernel demands more, which the detail states (Yama's ptrace_scope).
ProbeResult probe_cma();

}  // namespace tandem
