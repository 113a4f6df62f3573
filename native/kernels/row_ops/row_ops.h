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

// A norm of rows: y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight). With `residual`, x is
// first added to the residual, rounded to its type, and the sum is normed. Strides count items.
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

// RMSNorm (if there is a weight) and rotary embedding of query and key heads, in place: for heads
// [first_head, first_head + num_heads) of each row, the norm by the head's weight, then the
// rotation of the first `rotary_size` items, the first half against the second.
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

// Preparation of queries and keys for multi-head latent attention. Row t of `out` has the query of
// each head, then the key that all heads share: [num_heads + 1][rank + rotary_size]. This writes
// the rotated ends of the queries, and the whole key: its latent normed, its end rotated (the first
// half against the second). The first `rank` items of the queries are left alone.
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

// A gated activation: out[row, i] = f(gate[row, i]) * up[row, i], times sigmoid(row_gate[row]) if
// there is one.
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

// A soft cap: x = cap * tanh(x / cap), in place.
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

// A router's choice of experts: the top_k experts of each row, best first; of equal ones the lower
// id comes first. With several groups, only experts of the `num_top_groups` groups count whose best
// choices, one or two, have the largest sum. A row with a NaN gets ids 0, 1, ... and NaN as
// weights.
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

// A part of the first product of a LoRA adapter: low[i][q] = scale * sum over k of x[rows[i]][k]
// down[q][k].
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

// A part of the second product of a LoRA adapter: sums[rows[i]][c] += sum over q of low[i][q] up[c
// / 64][q][c % 64].
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

// Rounding of sums to their final type: out = sums, or out += sums, rounded once.
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

// The row kernels of one ISA; each runs rows [begin, end) of a task.
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

// Returns the row kernels for an ISA of `available_isas()`.
const RowKernels& choose_row_kernels(Isa isa);

// These functions run all rows of a task, on `pool` if it is given and the work is enough to share.
// REQUIRES: what the structs state; pointers are borrowed for the call.
Status run_norm(const RowKernels& kernels, ThreadPool* pool, const NormTask& task);
Status run_heads(const RowKernels& kernels, ThreadPool* pool, const HeadsTask& task);
Status run_latents(const RowKernels& kernels, ThreadPool* pool, const LatentsTask& task);
Status run_gate(const RowKernels& kernels, ThreadPool* pool, const GateTask& task);
Status run_soft_cap(const RowKernels& kernels, ThreadPool* pool, const SoftCapTask& task);
Status run_router(const RowKernels& kernels, ThreadPool* pool, const RouterTask& task);
Status run_round(const RowKernels& kernels, ThreadPool* pool, const RoundTask& task);

}  // namespace tandem
