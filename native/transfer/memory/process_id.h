// Who this process is to the others on its host, and whether another still lives.
#pragma once

#include <cstddef>
#include <string>

#include "transfer/wire/wire.h"

namespace tandem::transfer {

// Reads /proc; an empty host_id if it cannot be known (then nobody counts as on the same host).
ProcessId read_own_process();
bool is_same_host(const ProcessId& a, const ProcessId& b);
// REQUIRES: on this host. False once it has ended, also if its pid was given to another.
bool is_alive(const ProcessId& process);
std::string random_bytes(size_t size);

}  // namespace tandem::transfer
