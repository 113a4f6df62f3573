#include "base/machine/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/status.h"
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  // Returns 0, and leaves zeros, for a leaf above the CPU's highest.
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

void detect_amx(const Registers& leaf7, uint64_t xcr0, CpuFeatures& features) {
  if (!bit(leaf7.edx, 24)) return;
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

CpuFeatures detect() {
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
  detect_amx(leaf7, xcr0, features);
  return features;
}

#else

CpuFeatures detect() {
  CpuFeatures features;
#if defined(__aarch64__)
  features.vendor = "aarch64";
#else
  features.vendor = "unknown";
#endif
  return features;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace tandem
