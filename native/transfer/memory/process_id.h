// Identity of this process for others on its host, and the check whether another process is alive.
#pragma once

#include <cstddef>
#include <string>

#include "transfer/wire/wire.h"

namespace tandem::transfer {

// Reads /proc; host_id is empty if it cannot be determined (then nobody counts as on the same
// host).
ProcessId read_own_process();
bool is_same_host(const ProcessId& a, const ProcessId& b);
// Returns false if the process has ended, even if another has its pid. REQUIRES: on this host.
bool is_alive(const ProcessId& process);
std::string random_bytes(size_t size);

}  // namespace tandem::transfer
