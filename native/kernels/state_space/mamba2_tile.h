// The scratch memory of a tile of tokens, shared by Mamba2's body and the code that allocates it.
#pragma once

#include <stddef.h>

#include "kernels/state_space/mamba2.h"

namespace tandem {

// Number of tokens that pass over a panel before the next panel: enough that the time to load the
// panel hardly counts.
inline constexpr size_t kMamba2Tokens = 32;

static inline size_t value_stride_of(const Mamba2Shape& shape) {
  return num_panels_of(shape) * kStatePanel;
}

// Scratch memory for a tile of kMamba2Tokens tokens.
struct Mamba2Tile {
  float* keys;     // [token][state_dim]: B.
  float* queries;  // [token][state_dim]: C.
  float* values;   // [token][value_stride]: x; become outputs.
  float* dt;
  float* decay;
};

static inline size_t tile_floats(const Mamba2Shape& shape) {
  return kMamba2Tokens * (2 * shape.state_dim + value_stride_of(shape) + 2);
}

static inline Mamba2Tile split_scratch(const Mamba2Shape& shape, float* scratch) {
  const size_t keys = kMamba2Tokens * shape.state_dim;
  float* const gates = scratch + kMamba2Tokens * value_stride_of(shape);
  return {gates + 2 * kMamba2Tokens, gates + 2 * kMamba2Tokens + keys, scratch, gates,
          gates + kMamba2Tokens};
}

}  // namespace tandem
