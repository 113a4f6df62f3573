// The variants of the kernels in this build, and which of them this machine can run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem {

// Ascending: each runs everything that those before it do, faster. The first is for tests, and in
// builds for tests only: it has AMX's arithmetic in plain C++, runs anywhere, and is never chosen
// unless it is named.
enum class Isa { kAmxEmulated, kPlain, kAvx2, kAvx512Bw, kAvx512Vnni, kAvx512Bf16, kAmx };

// "amx_emulated", "plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16", "amx".
std::string_view isa_name(Isa isa);

// Those that this machine and this build have, ascending; never empty.
const std::vector<Isa>& available_isas();

// The widest one for an empty name; AMX only by its name, until it has been measured. Errors: kConfig
// (unknown name), kUnsupported (neither of this machine nor of this build).
Result<Isa> choose_isa(std::string_view name);

}  // namespace tandem
