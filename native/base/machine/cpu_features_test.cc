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

TEST(a_cap_hides_what_lies_above_it_alone) {
  CpuFeatures all;
  all.avx2 = all.fma = all.f16c = all.avx_vnni = true;
  all.avx512f = all.avx512bw = all.avx512vl = all.avx512dq = true;
  all.avx512_vnni = all.avx512_bf16 = all.avx512_vbmi = all.avx512_fp16 = true;
  all.amx_tile = all.amx_int8 = all.amx_bf16 = true;
  const auto sum = [&](std::string_view level) {
    const CpuFeatures f = hide_above(level, all);
    return f.avx2 + f.fma + f.f16c + f.avx_vnni + f.avx512f + f.avx512bw + f.avx512vl + f.avx512dq +
           f.avx512_vnni + f.avx512_bf16 + f.avx512_vbmi + f.avx512_fp16 + f.amx_tile + f.amx_int8 +
           f.amx_bf16;
  };
  CHECK_EQ(sum("plain"), 0);
  CHECK_EQ(sum("avx2"), 3);
  CHECK_EQ(sum("avx512_bw"), 7);
  CHECK_EQ(sum("avx512_vnni"), 9);
  CHECK_EQ(sum("avx512_bf16"), 11);
  CHECK_EQ(sum("amx"), 15);
  CHECK(hide_above("avx512_vnni", all).avx512_vnni);
  CHECK(!hide_above("avx512_vnni", all).avx512_bf16);
  CHECK_EQ(hide_above("avx2", all).cap, std::string("avx2"));
}

// A kernel chosen by the wider features may be running already.
TEST(a_cap_after_the_first_use_is_refused) {
  const std::string& cap = cpu_features().cap;
  const Status status = cap_cpu_features(cap == "plain" ? "avx2" : "plain");
  CHECK(!status.is_ok());
  CHECK(status.error().code == Code::kConflict);
  const Status unknown = cap_cpu_features("avx3");
  CHECK(!unknown.is_ok());
  CHECK(unknown.error().code == Code::kConfig);
  CHECK(unknown.error().what.find("avx512_vnni") != std::string::npos);
}

}  // namespace
}  // namespace tandem
