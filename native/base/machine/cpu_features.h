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
  // Reason why AMX is not usable although the CPU has it; empty if it is usable or absent.
  std::string amx_blocker;
  // Level that was passed to cap_cpu_features(); empty if it was not called.
  std::string cap;
};

// Makes cpu_features() hide instruction sets above a level: "plain", "avx2", "avx512_bw",
// "avx512_vnni", "avx512_bf16" or "amx", ascending. A level above the machine's own hides nothing.
// Thread-safe. Errors: kConfig (unknown level), kConflict (features were read under another cap
// before, so kernels may have been chosen by them).
Status cap_cpu_features(std::string_view level);

// Returns the usable instruction sets, which are detected at the first call; thread-safe. On a CPU
// with AMX the first call asks the operating system for permission to use tile registers
// (arch_prctl), which then holds for the whole process; with a cap below "amx" it does not ask.
const CpuFeatures& cpu_features();

// Returns `features` without the instruction sets above `level`, a level as for cap_cpu_features()
// or "" for no cap.
CpuFeatures hide_above(std::string_view level, CpuFeatures features);

}  // namespace tandem
