// The variants of the kernels in this build, and which of them this machine can run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem {

// Ascending: each runs everything that those before it do, faster.
enum class Isa { kPlain, kAvx2, kAvx512Bw, kAvx512Vnni, kAvx512Bf16 };

// "plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16".
std::string_view isa_name(Isa isa);

// Those that this machine and this build have, ascending; never empty.
const std::vector<Isa>& available_isas();

// The widest one for an empty name. Errors: kConfig (unknown name), kUnsupported (not here).
Result<Isa> choose_isa(std::string_view name);

}  // namespace tandem
