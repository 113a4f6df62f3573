// The index of sparse attention: scores of a step's tokens for the keys that they see, and the keys
// that score best.
//
// Keys are scored in tiles of 64 at fixed positions, and a score is one chain of operations, so
// that what a token chooses depends on its own query, position and context alone, as what it
// attends does (attention.h). Of equal scores the lowest position is chosen.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/attention/attention.h"

namespace tandem {

// The index queries of one layer, and the place of the chosen positions.
struct IndexCall {
  const void* q = nullptr;  // [tokens][num_heads][key_dim]; tokens `q_stride` items apart.
  size_t q_stride = 0;
  FloatType type = FloatType::kFloat32;
  size_t num_heads = 0;            // At most kTileRows.
  const float* weights = nullptr;  // [tokens][num_heads]; tokens `weight_stride` items apart.
  size_t weight_stride = 0;
  float scale = 1.0f;       // On the weights.
  size_t layer_offset = 0;  // Bytes from a block's begin to the layer's index keys.
  int32_t* chosen = nullptr;  // [tokens][num_chosen], written: positions, ascending.
  size_t num_chosen = 0;
};

// Writes the positions of the `count` largest of `num_scores` scores, ascending. Of equal scores
// the lowest position is chosen; NaN counts as larger than all numbers. `count` is at most
// `num_scores`.
void choose_largest(const float* scores, size_t num_scores, size_t count, int32_t* chosen);

// Chooses keys for each token. A token that sees no more than num_chosen keys gets all their
// positions, and then zeros. `step.kv` has the index keys. Errors: those of the pool.
Status run_index(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
                 const IndexCall& call);

}  // namespace tandem
