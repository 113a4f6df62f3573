#include "kernels/isa.h"

#include <algorithm>
#include <array>

#include "base/cpu_features.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 5> kIsaNames = {"plain", "avx2", "avx512_bw", "avx512_vnni",
                                                       "avx512_bf16"};

std::vector<Isa> detect_isas() {
  const CpuFeatures& cpu = cpu_features();
  std::vector<Isa> isas = {Isa::kPlain};
#if defined(__x86_64__)
  if (!(cpu.avx2 && cpu.fma && cpu.f16c)) return isas;
  isas.push_back(Isa::kAvx2);
  if (!(cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq)) return isas;
  isas.push_back(Isa::kAvx512Bw);
  if (!cpu.avx512_vnni) return isas;
  isas.push_back(Isa::kAvx512Vnni);
  // The lookup that widens e4m3 is VBMI's; only Cooper Lake has one without the other.
  if (cpu.avx512_bf16 && cpu.avx512_vbmi) isas.push_back(Isa::kAvx512Bf16);
#else
  static_cast<void>(cpu);
#endif
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
  if (name.empty()) return isas.back();
  const auto found = std::find(kIsaNames.begin(), kIsaNames.end(), name);
  const std::string choice = "choose one of " + join_names(isas);
  if (found == kIsaNames.end())
    return Error{Code::kConfig, "kernels.choose_isa",
                 "unknown ISA " + std::string(name) + ": " + choice, "isa"};
  const Isa isa = static_cast<Isa>(found - kIsaNames.begin());
  if (std::find(isas.begin(), isas.end(), isa) == isas.end())
    return Error{Code::kUnsupported, "kernels.choose_isa",
                 std::string(name) + " is not usable on this machine: " + choice, "isa"};
  return isa;
}

}  // namespace tandem
