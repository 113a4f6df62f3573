#include "base/machine/cpu_features.h"

#include <algorithm>
#include <array>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#endif

namespace tandem {
namespace {

enum Level { kPlain, kAvx2, kAvx512Bw, kAvx512Vnni, kAvx512Bf16, kAmx, kNumLevels };
constexpr std::array<std::string_view, kNumLevels> kLevelNames = {
    "plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16", "amx"};

// Returns the level with this name; kNumLevels if there is none.
Level find_level(std::string_view name) {
  return static_cast<Level>(std::find(kLevelNames.begin(), kLevelNames.end(), name) - kLevelNames.begin());
}

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  // For a leaf above the CPU's highest, this returns 0 and leaves zeros.
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool bit(uint32_t word, int index) { return (word >> index) & 1; }

// XCR0: the register state that the operating system saves at a context switch. Intel SDM 1, 13.3.
uint64_t read_xcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

constexpr uint64_t kXcr0Avx = 0x6;           // SSE and the upper halves of YMM.
constexpr uint64_t kXcr0Avx512 = 0xe0 | kXcr0Avx;  // Masks, upper halves of ZMM, ZMM16-31.
constexpr uint64_t kXcr0Amx = 0x60000;       // XTILECFG and XTILEDATA.

constexpr int kArchReqXcompPerm = 0x1023;  // asm/prctl.h, Linux 5.16.
constexpr int kXfeatureXtileData = 18;

// Linux enlarges a thread's signal frame by 8 KiB for tiles only for a process that asked.
std::string request_amx() {
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0) return "";
  return describe_errno("arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)", errno);
}

std::string read_vendor() {
  const Registers r = cpuid(0);
  char text[13] = {};
  std::memcpy(text, &r.ebx, 4);
  std::memcpy(text + 4, &r.edx, 4);
  std::memcpy(text + 8, &r.ecx, 4);
  return text;
}

std::string read_brand() {
  char text[49] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002 + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  const std::string brand(text);
  const size_t first = brand.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return brand.substr(first, brand.find_last_not_of(' ') - first + 1);
}

void detect_amx(const Registers& leaf7, uint64_t xcr0, Level cap, CpuFeatures& features) {
  if (!bit(leaf7.edx, 24)) return;
  if (cap < kAmx) {
    features.amx_blocker = "the cap on the instruction set is " + std::string(kLevelNames[cap]);
    return;
  }
  if ((xcr0 & kXcr0Amx) != kXcr0Amx) {
    features.amx_blocker = "the operating system does not save tile state (XCR0)";
    return;
  }
  features.amx_blocker = request_amx();
  if (!features.amx_blocker.empty()) return;
  features.amx_tile = true;
  features.amx_bf16 = bit(leaf7.edx, 22);
  features.amx_int8 = bit(leaf7.edx, 25);
}

CpuFeatures detect(Level cap) {
  CpuFeatures features;
  features.vendor = read_vendor();
  features.brand = read_brand();
  const Registers leaf1 = cpuid(1);
  const bool has_osxsave = bit(leaf1.ecx, 27);
  const uint64_t xcr0 = has_osxsave ? read_xcr0() : 0;
  if ((xcr0 & kXcr0Avx) != kXcr0Avx || !bit(leaf1.ecx, 28)) return features;
  const Registers leaf7 = cpuid(7);
  const Registers leaf7_1 = cpuid(7, 1);
  features.fma = bit(leaf1.ecx, 12);
  features.f16c = bit(leaf1.ecx, 29);
  features.avx2 = bit(leaf7.ebx, 5);
  features.avx_vnni = bit(leaf7_1.eax, 4);
  if ((xcr0 & kXcr0Avx512) == kXcr0Avx512 && bit(leaf7.ebx, 16)) {
    features.avx512f = true;
    features.avx512dq = bit(leaf7.ebx, 17);
    features.avx512bw = bit(leaf7.ebx, 30);
    features.avx512vl = bit(leaf7.ebx, 31);
    features.avx512_vbmi = bit(leaf7.ecx, 1);
    features.avx512_vnni = bit(leaf7.ecx, 11);
    features.avx512_fp16 = bit(leaf7.edx, 23);
    features.avx512_bf16 = bit(leaf7_1.eax, 5);
  }
  detect_amx(leaf7, xcr0, cap, features);
  return features;
}

#else

CpuFeatures detect(Level) {
  CpuFeatures features;
#if defined(__aarch64__)
  features.vendor = "aarch64";
#else
  features.vendor = "unknown";
#endif
  return features;
}

#endif

// The cap, and if it can still change.
struct Cap {
  std::mutex mutex;
  Level level = kNumLevels;  // None. Guarded by `mutex`, as is the next.
  bool is_final = false;
};

Cap& the_cap() {
  static Cap cap;
  return cap;
}

CpuFeatures detect_capped() {
  Cap& cap = the_cap();
  const std::lock_guard lock(cap.mutex);
  cap.is_final = true;
  if (cap.level == kNumLevels) return detect(kNumLevels);
  return hide_above(kLevelNames[cap.level], detect(cap.level));
}

}  // namespace

CpuFeatures hide_above(std::string_view level, CpuFeatures features) {
  const Level cap = find_level(level);
  features.cap = level;
  if (cap < kAvx2) features.avx2 = features.fma = features.f16c = false;
  if (cap < kAvx512Bw)
    features.avx512f = features.avx512bw = features.avx512vl = features.avx512dq = false;
  if (cap < kAvx512Vnni) features.avx512_vnni = features.avx_vnni = false;
  if (cap < kAvx512Bf16) features.avx512_bf16 = features.avx512_vbmi = false;
  // AVX512-FP16 came with AMX, in Sapphire Rapids, so a cap below AMX hides both.
  if (cap < kAmx)
    features.avx512_fp16 = features.amx_tile = features.amx_int8 = features.amx_bf16 = false;
  return features;
}

Status cap_cpu_features(std::string_view level) {
  const Level wanted = find_level(level);
  if (wanted == kNumLevels) {
    std::string names;
    for (const std::string_view name : kLevelNames) names += (names.empty() ? "" : ", ") + std::string(name);
    return {Code::kConfig, "machine.cap_cpu_features",
            "unknown instruction set " + std::string(level) + ": choose one of " + names, "max_isa"};
  }
  Cap& cap = the_cap();
  const std::lock_guard lock(cap.mutex);
  if (cap.is_final && cap.level != wanted)
    return {Code::kConflict, "machine.cap_cpu_features",
            "kernels may already have been chosen without the cap " + std::string(level) +
                ": set it before the first use", "max_isa"};
  cap.level = wanted;
  return {};
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect_capped();
  return features;
}

}  // namespace tandem
