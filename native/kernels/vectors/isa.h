// The instruction sets for which this build has kernels, and which of them this machine can run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem {

// Instruction sets in ascending order: each runs everything that those before it run, faster. The
// first is for tests, and only in builds for tests: it has AMX's arithmetic in plain C++, runs
// anywhere, and is used only if it is named.
enum class Isa { kAmxEmulated, kPlain, kAvx2, kAvx512Bw, kAvx512Vnni, kAvx512Bf16, kAmx };

// Returns the name: "amx_emulated", "plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16" or
// "amx".
std::string_view isa_name(Isa isa);

// Returns the instruction sets that both this machine and this build have, ascending; never empty.
const std::vector<Isa>& available_isas();

// Returns the instruction set with a name; for an empty name the widest one, but AMX only if it is
// named, until it has been measured. Errors: kConfig (unknown name), kUnsupported (this machine or
// this build lacks it).
Result<Isa> choose_isa(std::string_view name);

}  // namespace tandem
