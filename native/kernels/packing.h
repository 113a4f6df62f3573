// Coding and laying out weight matrices as weight_format.h says. Runs at load, on any ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/weight_format.h"

namespace tandem {

// A row-major matrix [rows, columns], fp32 or bf16, borrowed.
struct MatrixView {
  const void* data = nullptr;
  bool is_bf16 = false;
  size_t rows = 0;
  size_t columns = 0;
};

// Errors: kUnsupported (a combination of bits, group size and minimum without a kernel).
Status check_format(const WeightFormat& format);

// Errors: kShape (not whole groups).
Status check_size(const WeightFormat& format, size_t size, const char* name);

// Bytes of a panel over `size` inputs.
size_t panel_bytes(const WeightFormat& format, size_t size);

// Codes outputs [first_row, first_row + kPanelColumns) of the matrix, fewer at its end.
// Errors: kUnsupported (a weight is not finite, or too large for an fp16 scale); `out` is then
// undefined.
Status pack_panel(const WeightFormat& format, const MatrixView& matrix, size_t first_row,
                  uint8_t* out);

}  // namespace tandem
