// The recurrence of the gated delta rule by itself, and its gradients, over the tokens of one sequence; for training.
// Everything is contiguous float32. Sums have one order, so results do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/recurrent/gated_delta.h"

namespace tandem {

struct DeltaScanTask {
  GatedDeltaShape shape;  // The convolution's width is not read.
  size_t num_tokens = 0;
  const float* queries = nullptr;  // [tokens][num_k_heads][key_dim], normed and scaled.
  const float* keys = nullptr;     // The same, normed.
  const float* values = nullptr;   // [tokens][num_v_heads][value_dim].
  const float* decay = nullptr;    // [tokens][num_v_heads][num_decays].
  const float* beta = nullptr;     // [tokens][num_v_heads].
  // State of the sequence, laid out as a slot of GatedDeltaTask. A scan updates it; the scan of
  // gradients reads the state from which the forward scan began.
  float* state = nullptr;
  float* out = nullptr;  // [tokens][num_v_heads][value_dim], of a scan.
};

// The gradients of a scan: `d_out` is read, all others are written. Gradients of queries and keys
// are given for each value head: [tokens][num_v_heads][key_dim].
struct DeltaScanGradients {
  const float* d_out = nullptr;
  float* d_queries = nullptr;
  float* d_keys = nullptr;
  float* d_values = nullptr;
  float* d_decay = nullptr;
  float* d_beta = nullptr;
};

// Returns the floats of scratch memory that a thread needs for a scan's gradients.
size_t delta_gradients_scratch(const DeltaScanTask& task);

// Runs the scan, on `pool` if it is given. REQUIRES: what the structs state. Errors: kCapacity (no
// memory for scratch).
Status run_delta_scan(const RecurrentKernels& kernels, ThreadPool* pool, const DeltaScanTask& task);
Status run_delta_gradients(const RecurrentKernels& kernels, ThreadPool* pool,
                           const DeltaScanTask& task, const DeltaScanGradients& gradients);

}  // namespace tandem
