#include "kernels/vectors/isa.h"

#include <algorithm>
#include <array>

#include "base/machine/cpu_features.h"
#include "kernels/built_isas.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 7> kIsaNames = {
    "amx_emulated", "plain", "avx2", "avx512_bw", "avx512_vnni", "avx512_bf16", "amx"};

// These functions return true if the machine can run a variant; each variant also needs all before
// it. kernel_isas.cmake checks the same.
[[maybe_unused]] bool has_avx2(const CpuFeatures& cpu) { return cpu.avx2 && cpu.fma && cpu.f16c; }
[[maybe_unused]] bool has_avx512_bw(const CpuFeatures& cpu) {
  return has_avx2(cpu) && cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq;
}
[[maybe_unused]] bool has_avx512_vnni(const CpuFeatures& cpu) { return has_avx512_bw(cpu) && cpu.avx512_vnni; }
[[maybe_unused]] bool has_avx512_bf16(const CpuFeatures& cpu) {
  // The variant needs VBMI too, whose lookup widens e4m3; only Cooper Lake has AVX512_BF16 without
  // VBMI.
  return has_avx512_vnni(cpu) && cpu.avx512_bf16 && cpu.avx512_vbmi;
}
[[maybe_unused]] bool has_amx(const CpuFeatures& cpu) {
  return has_avx512_bf16(cpu) && cpu.amx_tile && cpu.amx_int8 && cpu.amx_bf16;
}

struct Variant {
  Isa isa;
  bool (*is_usable)(const CpuFeatures& cpu);
};

// Variants of this build that may be chosen for their speed, ascending.
constexpr Variant kBuilt[] = {
    {Isa::kPlain, [](const CpuFeatures&) { return true; }},
#ifdef TANDEM_BUILT_PACKED_AVX2
    {Isa::kAvx2, has_avx2},
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_BW
    {Isa::kAvx512Bw, has_avx512_bw},
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_VNNI
    {Isa::kAvx512Vnni, has_avx512_vnni},
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_BF16
    {Isa::kAvx512Bf16, has_avx512_bf16},
#endif
#ifdef TANDEM_BUILT_PACKED_AMX
    {Isa::kAmx, has_amx},
#endif
};

#ifdef TANDEM_BUILT_PACKED_AMX_EMULATED
constexpr bool kHasEmulatedAmx = true;
#else
constexpr bool kHasEmulatedAmx = false;
#endif

std::vector<Isa> detect_isas() {
  std::vector<Isa> isas;
  for (const Variant& variant : kBuilt)
    if (variant.is_usable(cpu_features())) isas.push_back(variant.isa);
  return isas;
}

std::string join_names(const std::vector<Isa>& isas) {
  std::string text;
  for (const Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(isa_name(isa));
  return text;
}

}  // namespace

std::string_view isa_name(Isa isa) { return kIsaNames[static_cast<size_t>(isa)]; }

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = detect_isas();
  return isas;
}

Result<Isa> choose_isa(std::string_view name) {
  const std::vector<Isa>& isas = available_isas();
  if (name.empty()) return isas.back() == Isa::kAmx ? Isa::kAvx512Bf16 : isas.back();
  const auto found = std::find(kIsaNames.begin(), kIsaNames.end(), name);
  const std::string choice = "choose one of " + join_names(isas);
  if (found == kIsaNames.end())
    return Error{Code::kConfig, "kernels.choose_isa",
                 "unknown ISA " + std::string(name) + ": " + choice, "isa"};
  const Isa isa = static_cast<Isa>(found - kIsaNames.begin());
  const bool is_usable = isa == Isa::kAmxEmulated
                             ? kHasEmulatedAmx
                             : std::find(isas.begin(), isas.end(), isa) != isas.end();
  if (!is_usable)
    return Error{Code::kUnsupported, "kernels.choose_isa",
                 std::string(name) + " is not usable on this machine, or not in this build (TANDEM_KERNEL_ISAS): " + choice, "isa"};
  return isa;
}

}  // namespace tandem
