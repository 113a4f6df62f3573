// Rows of gradients times a packed matrix, dX = dY W: one panel of 64 inputs at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/packed/packed_kernels.h"
#include "kernels/weights/weight_format.h"

namespace tandem {

// Returns the format to which gradients are rounded, and in which turned (transposed) panels are:
// fp32 for fp32 weights, else bf16.
constexpr WeightFormat gradient_format(const WeightFormat& format) {
  return {format.bits == 32 ? 32 : 16, 0, false, true};
}
constexpr size_t gradient_bytes(const WeightFormat& format) { return format.bits == 32 ? 4 : 2; }

inline float widen_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

struct TurnedProduct {
  WeightFormat format;
  const uint8_t* panels;   // Of the matrix, 64 outputs each.
  size_t panel_stride;     // Bytes.
  size_t num_panels;
  size_t first_k;          // A multiple of kPanelColumns.
  size_t num_k;            // At most kPanelColumns, whole steps of the format.
  Operand d_y;             // Rows in the format of gradients, readable over all panels; finite
                           // beyond the outputs.
  const int32_t* row_ids;  // Of d_y; null: consecutive ones.
  size_t num_rows;
  float* out;              // [num_rows][out_stride]
  size_t out_stride;
  size_t num_columns;
  bool is_added = false;   // To what is there.
};

// Multiplies gradients with a turned matrix. Outputs are turned kTurnedOutputs at a time, in
// ascending order, so that the sums do not depend on the rows.
void multiply_turned(const PackedKernels& kernels, const TurnedProduct& product);

}  // namespace tandem
