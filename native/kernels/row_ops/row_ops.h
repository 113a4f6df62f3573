// Operators on rows of activations: RMSNorm, rotation of heads with their norm, gated activations,
// soft caps, and the choice of experts. Rows are independent: a row's result is bitwise the same alone and in company,
// for any number of threads and on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/vectors/float_type.h"
#include "kernels/vectors/isa.h"

namespace tandem {

// y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight). With `residual`, first residual += x, rounded to its
// type, and the sum is what is normed. Strides count items.
struct NormTask {
  const void* x = nullptr;
  size_t x_stride = 0;
  FloatType x_type = FloatType::kFloat32;  // Other than `type` only with a residual.
  void* residual = nullptr;
  size_t residual_stride = 0;
  const void* weight = nullptr;
  void* out = nullptr;
  size_t out_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of residual, weight and out.
  size_t num_rows = 0;
  size_t size = 0;
  float eps = 0.0f;
  float weight_offset = 0.0f;
};

// In place on heads [first_head, first_head + num_heads) of each row: RMSNorm by the head's weight
// where there is one, then the rotation of its first `rotary_size` items, halves by halves.
struct HeadsTask {
  void* x = nullptr;  // [rows][heads][head_dim], rows `x_stride` items apart.
  size_t x_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of everything here.
  size_t num_rows = 0;
  size_t num_q_heads = 0;
  size_t num_k_heads = 0;  // Behind the query heads.
  size_t head_dim = 0;
  const void* q_weight = nullptr;  // [head_dim]; null norms nothing.
  const void* k_weight = nullptr;
  float eps = 0.0f;
  float weight_offset = 0.0f;  // Of both.
  const void* cos = nullptr;  // [rows][rotary_size / 2 at least], rows `angle_stride` items apart.
  const void* sin = nullptr;
  size_t angle_stride = 0;
  size_t rotary_size = 0;
};

// What multi-head latent attention attends with: row t of `out` is, for each head, its query, and
// then the key that all heads share, [num_heads + 1][rank + rotary_size]. Written are the rotated
// ends of the queries, and the whole key: its latent normed, its end rotated, halves by halves. The
// queries' first `rank` items are left alone.
struct LatentsTask {
  const void* q = nullptr;  // [rows][num_heads][head_dim], rows `q_stride` items apart.
  size_t q_stride = 0;
  const void* kv = nullptr;  // [rows][rank + rotary_size], rows `kv_stride` items apart.
  size_t kv_stride = 0;
  const void* weight = nullptr;  // [rank], of the norm.
  float eps = 0.0f;
  const void* cos = nullptr;  // [rows][rotary_size / 2 at least], rows `angle_stride` items apart.
  const void* sin = nullptr;
  size_t angle_stride = 0;
  void* out = nullptr;
  size_t out_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of everything here.
  size_t num_rows = 0;
  size_t num_heads = 0;
  size_t head_dim = 0;  // The last `rotary_size` items of a query are rotated.
  size_t rank = 0;
  size_t rotary_size = 0;  // Even.
};

enum class GateKind { kSilu, kGeluErf, kGeluTanh, kSigmoid };

// out[row, i] = f(gate[row, i]) * up[row, i], times sigmoid(row_gate[row]).
struct GateTask {
  const void* gate = nullptr;
  size_t gate_stride = 0;
  const void* up = nullptr;  // May be `out`.
  size_t up_stride = 0;
  void* out = nullptr;
  size_t out_stride = 0;
  const void* row_gate = nullptr;  // Null is none; items `row_gate_stride` apart.
  size_t row_gate_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of everything here.
  size_t num_rows = 0;
  size_t size = 0;
  GateKind kind = GateKind::kSilu;
};

// x = cap * tanh(x / cap), in place.
struct SoftCapTask {
  float* x = nullptr;
  size_t stride = 0;
  size_t num_rows = 0;
  size_t size = 0;
  float cap = 0.0f;  // Positive.
};

enum class Scoring {
  kSoftmax,            // Over all experts.
  kSoftmaxNormalised,  // Over the chosen ones.
  kSigmoid,            // Of each; chosen by score + bias, weighed by score.
  kSigmoidNormalised,  // The same, divided by the sum of the chosen.
};

// The top_k experts of each row, best first; of equals the lower id first. With several groups,
// only those `num_top_groups` count whose best choices, one or two, have the largest sum. A row with a NaN
// gets ids 0, 1, ... and NaN as weights.
struct RouterTask {
  const void* logits = nullptr;  // [rows][num_experts], contiguous.
  FloatType logits_type = FloatType::kFloat32;
  const float* bias = nullptr;  // [num_experts]; null is none.
  void* weights = nullptr;      // [rows][top_k], contiguous.
  FloatType weights_type = FloatType::kFloat32;
  int64_t* ids = nullptr;  // [rows][top_k], contiguous.
  size_t num_rows = 0;
  size_t num_experts = 0;  // At most kMaxRouterExperts.
  size_t top_k = 0;        // At most kMaxTopK and the experts of the groups that count.
  size_t num_groups = 1;   // Divides num_experts.
  size_t num_top_groups = 1;
  size_t num_group_choices = 2;  // Of a group's best choices are summed: 1 or 2.
  Scoring scoring = Scoring::kSoftmax;
  float weight_scale = 1.0f;
};

// A piece of an adapter's first product: low[i][q] = scale * sum over k of x[rows[i]][k] down[q][k].
struct LoraDown {
  const void* x = nullptr;
  size_t x_stride = 0;
  const int64_t* rows = nullptr;
  size_t num_rows = 0;
  const void* down = nullptr;  // [num_ranks][in_size].
  size_t in_size = 0;
  size_t num_ranks = 0;
  float scale = 1.0f;
  float* low = nullptr;
  size_t low_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of x and down.
};

// A piece of its second: sums[rows[i]][c] += sum over q of low[i][q] up[c / 64][q][c % 64].
struct LoraUp {
  const float* low = nullptr;  // [num_rows][rank].
  size_t rank = 0;
  const int64_t* rows = nullptr;
  size_t num_rows = 0;
  const void* up = nullptr;
  float* sums = nullptr;
  size_t sums_stride = 0;
  size_t num_columns = 0;
  FloatType type = FloatType::kFloat32;  // Of up.
};

// out = sums, or out += sums, rounded once.
struct RoundTask {
  const float* sums = nullptr;
  size_t sums_stride = 0;
  size_t sums_head_stride = 0;
  void* out = nullptr;
  size_t out_stride = 0;
  size_t out_head_stride = 0;
  FloatType out_type = FloatType::kFloat32;
  bool is_added = false;
  size_t num_rows = 0;
  size_t num_heads = 1;
  size_t size = 0;  // Of a head.
};

inline constexpr size_t kMaxRouterExperts = 4096;
inline constexpr size_t kMaxTopK = 64;
inline constexpr size_t kMaxHeadDim = 4096;

// The functions of one ISA; each runs rows [begin, end).
struct RowKernels {
  void (*norm)(const NormTask&, size_t begin, size_t end);
  void (*heads)(const HeadsTask&, size_t begin, size_t end);
  void (*latents)(const LatentsTask&, size_t begin, size_t end);
  void (*gate)(const GateTask&, size_t begin, size_t end);
  void (*soft_cap)(const SoftCapTask&, size_t begin, size_t end);
  void (*route)(const RouterTask&, size_t begin, size_t end);
  void (*round)(const RoundTask&, size_t begin, size_t end);
  void (*lora_down)(const LoraDown&);
  void (*lora_up)(const LoraUp&);
};

// The kernels for an ISA of `available_isas()`.
const RowKernels& choose_row_kernels(Isa isa);

// Run all rows, on `pool` if it is given and there is enough to share. REQUIRES: what the structs
// say; pointers are borrowed for the call.
Status run_norm(const RowKernels& kernels, ThreadPool* pool, const NormTask& task);
Status run_heads(const RowKernels& kernels, ThreadPool* pool, const HeadsTask& task);
Status run_latents(const RowKernels& kernels, ThreadPool* pool, const LatentsTask& task);
Status run_gate(const RowKernels& kernels, ThreadPool* pool, const GateTask& task);
Status run_soft_cap(const RowKernels& kernels, ThreadPool* pool, const SoftCapTask& task);
Status run_router(const RowKernels& kernels, ThreadPool* pool, const RouterTask& task);
Status run_round(const RowKernels& kernels, ThreadPool* pool, const RoundTask& task);

}  // namespace tandem
