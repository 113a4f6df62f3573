// The inputs of a short convolution that a sequence's next token sees: kept in its slot between steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/vectors/float_type.h"

namespace tandem {

// The rows of sequences, and where the last ones of each are kept. Strides count items.
struct CarriedRows {
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;  // [rows][channels].
  size_t x_stride = 0;
  void* carried = nullptr;  // Slots of [conv_width - 1][channels].
  size_t carried_stride = 0;
  size_t channels = 0, conv_width = 0;
  const int64_t* query_start = nullptr;
  const int64_t* slots = nullptr;
  size_t num_sequences = 0;
};

inline void carry_inputs(const CarriedRows& rows) {
  const size_t kept = rows.conv_width - 1;
  const size_t item_bytes = float_bytes(rows.type), row = rows.channels * item_bytes;
  for (size_t s = 0; s < rows.num_sequences; ++s) {
    const size_t end = static_cast<size_t>(rows.query_start[s + 1]);
    const size_t count = std::min(kept, end - static_cast<size_t>(rows.query_start[s]));
    char* carried = static_cast<char*>(rows.carried) +
                    static_cast<size_t>(rows.slots[s]) * rows.carried_stride * item_bytes;
    if (count < kept) std::memmove(carried, carried + count * row, (kept - count) * row);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(carried + (kept - count + i) * row,
                  static_cast<const char*>(rows.x) + (end - count + i) * rows.x_stride * item_bytes,
                  row);
  }
}

}  // namespace tandem
