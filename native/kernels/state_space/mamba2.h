// Mamba2's state space (arXiv:2405.21060) over the tokens of many sequences, from the projection's results to what the
// output projection takes: short convolution, time steps, the recurrence, skip, gate and norm.
//
// The recurrence runs token by token: S = decay S + B (dt x)^T; y = S^T C + D x. Each sum has one order, so that a
// token's result is bitwise the same in any chunk and batch, for any number of threads, on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/recurrent/gated_delta.h"
#include "kernels/state_space/state_space.h"
#include "kernels/vectors/float_type.h"

namespace tandem {

// Sizes of a layer. A state is [head][head_dim / 32][state_dim][32] floats, like that of a gated
// delta rule whose keys are B.
struct Mamba2Shape {
  size_t num_heads = 0;   // A multiple of num_groups: group i serves the i-th part of the heads.
  size_t head_dim = 0;    // At most kMaxStateDim.
  size_t num_groups = 0;  // Groups of B and C, and of the norm.
  size_t state_dim = 0;   // Items of a B or C, at most kMaxStateDim.
  size_t conv_width = 0;  // Inputs that an output of the convolution sees, 1 to kMaxConvWidth.
};

// These are static functions and not members, because sources compiled for several instruction sets
// call them, and each must keep its own copy.
static inline size_t num_values_of(const Mamba2Shape& shape) {
  return shape.num_heads * shape.head_dim;
}
static inline size_t num_channels_of(const Mamba2Shape& shape) {
  return num_values_of(shape) + 2 * shape.num_groups * shape.state_dim;
}
static inline size_t num_panels_of(const Mamba2Shape& shape) {
  return (shape.head_dim + kStatePanel - 1) / kStatePanel;
}
static inline size_t state_size_of(const Mamba2Shape& shape) {
  return shape.num_heads * num_panels_of(shape) * shape.state_dim * kStatePanel;
}

// The weights of a layer; borrowed.
struct Mamba2Weights {
  const float* conv = nullptr;        // [conv_width][num_channels], the oldest input first.
  const float* conv_bias = nullptr;   // [num_channels], or null.
  const float* decay_rate = nullptr;  // [num_heads]: the logarithm of a decay is -rate * dt.
  const float* dt_bias = nullptr;     // [num_heads]: dt is softplus(dt + bias) within the limits.
  const float* skip = nullptr;        // [num_heads]: D.
  const float* norm = nullptr;        // [num_values].
  float norm_eps = 0.0f;
  float dt_min = 0.0f;
  float dt_max = 0.0f;  // May be infinite.
};

// The state space of a step's rows: `x` has x, B and C before the convolution; `z` and `out` have
// num_values items.
struct Mamba2Task : StateRows {
  Mamba2Shape shape;
  Mamba2Weights weights;
  const void* dt = nullptr;              // [rows][num_heads].
  size_t dt_stride = 0;
  FloatType dt_type = FloatType::kFloat32;
  float* mixed = nullptr;  // [rows][num_values]: y before gate and norm; scratch.
};

// One unit of work: heads [begin, end) of one group, over the rows of one sequence.
struct Mamba2Item {
  size_t sequence, group, begin, end;
};

size_t mamba2_scratch(const Mamba2Shape& shape);

// Runs all rows of a task, on `pool` if it is given and the work is enough to share. REQUIRES: what
// the structs state; pointers are borrowed for the call. Errors: kCapacity (no memory for scratch).
Status run_mamba2(const StateSpaceKernels& kernels, ThreadPool* pool, const Mamba2Task& task);

}  // namespace tandem
