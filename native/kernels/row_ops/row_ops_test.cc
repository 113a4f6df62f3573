// Goal: the row operators touch no memory but theirs, and all ISAs agree.
//
// Method: exactly sized heap memory and sizes around those of registers; mostly for the sanitizers.
// What the results should be is tested from Python against an oracle.
#include "kernels/row_ops/row_ops.h"

#include <cmath>
#include <vector>

#include "base/test.h"

namespace tandem {
namespace {

template <class T>
std::vector<T> make(size_t size) {
  std::vector<T> values(size);
  for (size_t i = 0; i < size; ++i) {
    const float x = std::sin(static_cast<float>(i * 31 % 997));
    if constexpr (sizeof(T) == 4)
      values[i] = x;
    else
      values[i] = static_cast<T>(0x3f00 + i * 7 % 200);
  }
  return values;
}

constexpr size_t kSizes[] = {1, 4, 15, 16, 17, 63, 64, 65, 130};

template <class T>
std::vector<T> run_all(FloatType type, Isa isa, size_t size) {
  const RowKernels& kernels = choose_row_kernels(isa);
  std::vector<T> all;
  std::vector<T> x = make<T>(3 * size), residual = make<T>(3 * size), weight = make<T>(size);
  std::vector<T> out(3 * size);
  NormTask norm;
  norm.x = x.data();
  norm.x_stride = norm.residual_stride = norm.out_stride = size;
  norm.residual = residual.data();
  norm.weight = weight.data();
  norm.out = out.data();
  norm.x_type = norm.type = type;
  norm.num_rows = 3;
  norm.size = size;
  norm.eps = 1e-6f;
  CHECK(run_norm(kernels, nullptr, norm).is_ok());
  all.insert(all.end(), out.begin(), out.end());

  std::vector<T> heads = make<T>(2 * 3 * size), cos = make<T>(2 * size), sin = make<T>(2 * size);
  HeadsTask rotation;
  rotation.x = heads.data();
  rotation.x_stride = 3 * size;
  rotation.type = type;
  rotation.num_rows = 2;
  rotation.num_q_heads = 2;
  rotation.num_k_heads = 1;
  rotation.head_dim = size;
  rotation.q_weight = weight.data();
  rotation.cos = cos.data();
  rotation.sin = sin.data();
  rotation.eps = 1e-6f;
  rotation.angle_stride = size;
  rotation.rotary_size = size / 2 * 2;
  CHECK(run_heads(kernels, nullptr, rotation).is_ok());
  all.insert(all.end(), heads.begin(), heads.end());

  std::vector<T> queries = make<T>(2 * 3 * (size + 4)), kv = make<T>(2 * (size + 2));
  std::vector<T> latents(2 * 4 * (size + 2));
  LatentsTask latent;
  latent.q = queries.data();
  latent.q_stride = 3 * (size + 4);
  latent.kv = kv.data();
  latent.kv_stride = size + 2;
  latent.weight = weight.data();
  latent.eps = 1e-6f;
  latent.cos = kv.data();
  latent.sin = queries.data();
  latent.angle_stride = 2;
  latent.out = latents.data();
  latent.out_stride = 4 * (size + 2);
  latent.type = type;
  latent.num_rows = 2;
  latent.num_heads = 3;
  latent.head_dim = size + 4;
  latent.rank = size;
  latent.rotary_size = 2;
  CHECK(run_latents(kernels, nullptr, latent).is_ok());
  all.insert(all.end(), latents.begin(), latents.end());

  std::vector<T> gate_up = make<T>(2 * 2 * size), product(2 * size);
  std::vector<T> row_gate = make<T>(2);
  for (GateKind kind :
       {GateKind::kSilu, GateKind::kGeluErf, GateKind::kGeluTanh, GateKind::kSigmoid}) {
    GateTask gate;
    gate.gate = gate_up.data();
    gate.gate_stride = 2 * size;
    gate.up = gate_up.data() + size;
    gate.up_stride = 2 * size;
    gate.out = product.data();
    gate.out_stride = size;
    gate.type = type;
    gate.num_rows = 2;
    gate.size = size;
    gate.kind = kind;
    CHECK(run_gate(kernels, nullptr, gate).is_ok());
    all.insert(all.end(), product.begin(), product.end());
    gate.row_gate = row_gate.data();
    gate.row_gate_stride = 1;
    CHECK(run_gate(kernels, nullptr, gate).is_ok());
    all.insert(all.end(), product.begin(), product.end());
  }
  if constexpr (sizeof(T) == 4) {
    std::vector<float> capped = make<float>(2 * size);
    SoftCapTask cap{capped.data(), size, 2, size, 0.5f};
    CHECK(run_soft_cap(kernels, nullptr, cap).is_ok());
    all.insert(all.end(), capped.begin(), capped.end());
  }

  std::vector<T> logits = make<T>(2 * size), weights(2 * ((size + 3) / 4));
  std::vector<int64_t> ids(weights.size());
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoidNormalised}) {
    RouterTask router;
    router.logits = logits.data();
    router.logits_type = router.weights_type = type;
    router.weights = weights.data();
    router.ids = ids.data();
    router.num_rows = 2;
    router.num_experts = size;
    router.top_k = (size + 3) / 4;
    router.num_groups = size % 4 == 0 ? 4 : 1;
    router.num_top_groups = size % 4 == 0 ? 2 : 1;
    router.scoring = scoring;
    CHECK(run_router(kernels, nullptr, router).is_ok());
    all.insert(all.end(), weights.begin(), weights.end());
  }
  return all;
}

}  // namespace

TEST(row_ops_isas_agree) {
  for (const size_t size : kSizes) {
    const std::vector<float> want = run_all<float>(FloatType::kFloat32, Isa::kPlain, size);
    const std::vector<uint16_t> short_want =
        run_all<uint16_t>(FloatType::kBfloat16, Isa::kPlain, size);
    for (const float value : want) CHECK(std::isfinite(value));
    for (const Isa isa : available_isas()) {
      CHECK(run_all<float>(FloatType::kFloat32, isa, size) == want);
      CHECK(run_all<uint16_t>(FloatType::kBfloat16, isa, size) == short_want);
    }
  }
}

}  // namespace tandem
