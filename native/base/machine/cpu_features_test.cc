#include "base/machine/cpu_features.h"

#include "base/machine/sysfs.h"
#include "base/test.h"

namespace tandem {
namespace {

// Method: the kernel's own reading of the same CPU is the oracle. It hides what it does not enable.
TEST(cpu_features_agree_with_the_kernel) {
  const auto text = Root().read_text("/proc/cpuinfo");
  if (!text) return;
  const size_t at = text->find("\nflags");
  if (at == std::string::npos) return;
  const std::string flags = text->substr(at + 1, text->find('\n', at + 1) - at - 1) + " ";
  const auto has = [&](const std::string& name) {
    return flags.find(" " + name + " ") != std::string::npos;
  };
  const CpuFeatures& f = cpu_features();
  CHECK_EQ(f.avx2, has("avx2"));
  CHECK_EQ(f.fma, has("fma"));
  CHECK_EQ(f.f16c, has("f16c"));
  CHECK_EQ(f.avx_vnni, has("avx_vnni"));
  CHECK_EQ(f.avx512f, has("avx512f"));
  CHECK_EQ(f.avx512bw, has("avx512bw"));
  CHECK_EQ(f.avx512vl, has("avx512vl"));
  CHECK_EQ(f.avx512dq, has("avx512dq"));
  CHECK_EQ(f.avx512_vnni, has("avx512_vnni"));
  CHECK_EQ(f.avx512_bf16, has("avx512_bf16"));
  CHECK_EQ(f.avx512_vbmi, has("avx512vbmi"));
  CHECK_EQ(f.avx512_fp16, has("avx512_fp16"));
  if (f.amx_blocker.empty()) CHECK_EQ(f.amx_tile, has("amx_tile"));
  CHECK(text->find(f.vendor) != std::string::npos);
}

TEST(wider_sets_imply_narrower_ones) {
  const CpuFeatures& f = cpu_features();
  CHECK(!f.avx512_bf16 || f.avx512f);
  CHECK(!f.avx512f || f.avx2);
  CHECK(!f.amx_int8 || f.amx_tile);
}

}  // namespace
}  // namespace tandem
