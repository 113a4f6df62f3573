// The rows of a step that a layer with a state computes, and the slots of their sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/vectors/float_type.h"

namespace tandem {

// The rows of a step, sequence after sequence, and the slots of the sequences. Strides count items;
// pointers are borrowed.
struct SequenceRows {
  const void* x = nullptr;  // [rows][channels, or more], what the convolution sees.
  size_t x_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of x, z, carried and out.
  void* out = nullptr;
  size_t out_stride = 0;
  void* carried = nullptr;  // Slots of the last inputs of the convolution. Read, then written.
  size_t carried_stride = 0;
  const int64_t* query_start = nullptr;  // [num_sequences + 1] rows.
  const int64_t* slots = nullptr;        // [num_sequences], no two alike.
  size_t num_sequences = 0;
};

// The rows of a step in a layer that also keeps state matrices, and whose output has a gate.
struct StateRows : SequenceRows {
  const void* z = nullptr;  // [rows][values], as out.
  size_t z_stride = 0;
  float* states = nullptr;  // Slots. Read, then written.
  size_t state_stride = 0;
};

}  // namespace tandem
