// Gated delta rule (Gated DeltaNet, arXiv:2412.06464) over the tokens of many sequences, from the projections' results
// to what the output projection takes: short convolution, gates, normed queries and keys, the recurrence, gated norm.
//
// The recurrence runs token by token: S = decay S; u = beta (v - S^T k); S = S + k u^T; o = S^T q. A decay is one number
// or, in Kimi delta attention (arXiv:2510.26692), one for each item of a key. Each sum has one order, so that a token's
// result is bitwise the same in any chunk and batch, for any number of threads, on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/recurrent/rows.h"
#include "kernels/vectors/float_type.h"
#include "kernels/vectors/isa.h"

namespace tandem {

// Number of value columns of a state that are stored side by side (a panel): [head_v][v /
// 32][key_dim][32] floats. The columns of a panel stay in the L1 cache while tokens pass over them.
// The last panel of a head is filled up with zeros.
inline constexpr size_t kStatePanel = 32;

inline constexpr size_t kMaxConvWidth = 16;
inline constexpr size_t kMaxStateDim = 1024;

struct GatedDeltaShape {
  size_t num_k_heads = 0;
  size_t num_v_heads = 0;  // A multiple of num_k_heads: key head i serves the i-th group of value heads.
  size_t key_dim = 0;      // Of a head, at most kMaxStateDim.
  size_t value_dim = 0;    // Of a head, at most kMaxStateDim.
  size_t conv_width = 0;   // Inputs that an output of the convolution sees, 1 to kMaxConvWidth.
  size_t num_decays = 1;   // Of a value head: 1, or key_dim.
};

// These are static functions and not members, because sources compiled for several instruction sets
// call them, and each must keep its own copy.
static inline size_t num_channels_of(const GatedDeltaShape& shape) {
  return 2 * shape.num_k_heads * shape.key_dim + shape.num_v_heads * shape.value_dim;
}
static inline size_t num_panels_of(const GatedDeltaShape& shape) {
  return (shape.value_dim + kStatePanel - 1) / kStatePanel;
}
static inline size_t all_decays_of(const GatedDeltaShape& shape) {
  return shape.num_v_heads * shape.num_decays;
}
// Returns the number of floats in a sequence's state.
static inline size_t state_size_of(const GatedDeltaShape& shape) {
  return shape.num_v_heads * num_panels_of(shape) * shape.key_dim * kStatePanel;
}

// The weights of a layer; borrowed.
struct GatedDeltaWeights {
  const float* conv = nullptr;        // [conv_width][num_channels], the oldest input first.
  const float* decay_rate = nullptr;  // [num_v_heads]: the logarithm of a decay is -rate * softplus(a + bias).
  const float* decay_bias = nullptr;  // [num_v_heads][num_decays].
  const float* norm = nullptr;        // [value_dim].
  float norm_eps = 0.0f;
  float beta_scale = 1.0f;     // beta = scale * sigmoid(b).
  bool is_silu_gated = true;   // The normed output is multiplied by silu(z), else by sigmoid(z).
};

// The gated delta rule of a step's rows: `x` has queries, keys and values before the convolution;
// `z` and `out` have all value heads.
struct GatedDeltaTask : StateRows {
  GatedDeltaShape shape;
  GatedDeltaWeights weights;
  const void* a = nullptr;  // [rows][num_v_heads][num_decays].
  size_t a_stride = 0;
  const void* b = nullptr;  // [rows][num_v_heads].
  size_t b_stride = 0;
  FloatType gate_type = FloatType::kFloat32;  // Of a and b.
};

// One unit of work: value heads [v_begin, v_end) of one key head, over the rows of one sequence.
struct GatedDeltaItem {
  size_t sequence, k_head, v_begin, v_end;
};

struct DeltaScanTask;
struct DeltaScanGradients;

// The kernels of one ISA. `scratch` is memory of the calling thread, of gated_delta_scratch or
// delta_gradients_scratch floats. `scan` and `gradients` run one value head.
struct RecurrentKernels {
  void (*gated_delta)(const GatedDeltaTask& task, const GatedDeltaItem& item, float* scratch);
  void (*scan)(const DeltaScanTask& task, size_t head, float* scratch);
  void (*gradients)(const DeltaScanTask& task, const DeltaScanGradients& gradients, size_t head,
                    float* scratch);
};

size_t gated_delta_scratch(const GatedDeltaShape& shape);

// Returns the recurrent kernels for an ISA of `available_isas()`.
const RecurrentKernels& choose_recurrent_kernels(Isa isa);

// Runs all rows of a task, on `pool` if it is given and the work is enough to share. REQUIRES: what
// the structs state; pointers are borrowed for the call. Errors: kCapacity (no memory for scratch).
Status run_gated_delta(const RecurrentKernels& kernels, ThreadPool* pool, const GatedDeltaTask& task);

}  // namespace tandem
