// The instruction sets that compiled kernels may use on this machine: supported by the CPU *and*
// enabled by the operating system (XCR0; for AMX also the kernel's permission for this process).
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace tandem {

struct CpuFeatures {
  std::string vendor;  // "GenuineIntel", "AuthenticAMD", ...; the architecture off x86.
  std::string brand;
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx_vnni = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool avx512_fp16 = false;
  bool amx_tile = false;
  bool amx_int8 = false;
  bool amx_bf16 = false;
  // Why AMX is not usable although the CPU has it; empty otherwise.
  std::string amx_blocker;
  // The level that cap_cpu_features() was given; empty if it was not called.
  std::string cap;
};

// Hides from cpu_features() what lies above a level: "plain", "avx2", "avx512_bw", "avx512_vnni",
// "avx512_bf16" or "amx", ascending. A level above the machine's own hides nothing. Thread-safe.
// Errors: kConfig (unknown level), kConflict (features were read under another cap, so that
// kernels may have been chosen by them).
Status cap_cpu_features(std::string_view level);

// Detected once, at the first call; thread-safe. On a CPU with AMX the first call asks the kernel
// for the permission to use tiles (arch_prctl), which then holds for the whole process; a cap
// below "amx" does not ask.
const CpuFeatures& cpu_features();

// `features` without what lies above `level`, a level of cap_cpu_features() or "" for no cap.
CpuFeatures hide_above(std::string_view level, CpuFeatures features);

}  // namespace tandem
