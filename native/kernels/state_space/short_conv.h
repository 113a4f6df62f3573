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
#include "kernels/recurrent/rows.h"
#include "kernels/state_space/state_space.h"
#include "kernels/vectors/float_type.h"

namespace tandem {

// Number of channels that are computed together.
inline constexpr size_t kConvBlock = 64;

// The short convolution of a step's rows: `x` has B, C and x, num_channels items each; `out` has
// num_channels.
struct ShortConvTask : SequenceRows {
  size_t num_channels = 0;
  size_t conv_width = 0;        // Products that an output sees, 1 to kMaxConvWidth.
  const float* conv = nullptr;  // [conv_width][num_channels], the oldest product first.
  const float* bias = nullptr;  // [num_channels], or null.
};

// One unit of work: channels [first, first + size), at most kConvBlock, over the rows of one
// sequence.
struct ShortConvItem {
  size_t sequence, first, size;
};

// Runs all rows of a task, on `pool` if it is given and the work is enough to share. REQUIRES: what
// the structs state.
Status run_short_conv(const StateSpaceKernels& kernels, ThreadPool* pool,
                      const ShortConvTask& task);

}  // namespace tandem
