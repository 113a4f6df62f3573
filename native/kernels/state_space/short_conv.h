// The short convolution of a layer (LFM2) over the tokens of many sequences: y = C * conv(B * x), where B, C and x are
// the parts of a row.
//
// A sequence carries its last products B * x, rounded to the type of the rows, as all products are before they are
// summed: a token's result is bitwise the same in any chunk and batch, for any number of threads, on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/state_space/state_space.h"
#include "kernels/vectors/float_type.h"

namespace tandem {

// Channels that pass together.
inline constexpr size_t kConvBlock = 64;

// Rows of all sequences, one after another. Strides count items; pointers are borrowed.
struct ShortConvTask {
  size_t num_channels = 0;
  size_t conv_width = 0;        // Products that an output sees, 1 to kMaxConvWidth.
  const float* conv = nullptr;  // [conv_width][num_channels], the oldest product first.
  const float* bias = nullptr;  // [num_channels], or null.
  const void* x = nullptr;      // [rows][3 * num_channels]: B, C, x.
  size_t x_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of x, carried and out.
  void* out = nullptr;                   // [rows][num_channels].
  size_t out_stride = 0;
  void* carried = nullptr;  // Slots of [conv_width - 1][num_channels]. Read, then written.
  size_t carried_stride = 0;
  const int64_t* query_start = nullptr;  // [num_sequences + 1] rows.
  const int64_t* slots = nullptr;        // [num_sequences], no two alike.
  size_t num_sequences = 0;
};

// Channels [first, first + size), at most kConvBlock, over the rows of one sequence.
struct ShortConvItem {
  size_t sequence, first, size;
};

// Runs all rows, on `pool` if it is given and there is enough to share. REQUIRES: what the structs say.
Status run_short_conv(const StateSpaceKernels& kernels, ThreadPool* pool,
                      const ShortConvTask& task);

}  // namespace tandem
