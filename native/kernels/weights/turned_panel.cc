#include "kernels/weights/turned_panel.h"

#include <algorithm>

namespace tandem {

void multiply_turned(const PackedKernels& kernels, const TurnedProduct& product) {
  constexpr size_t kMaxPanels = kTurnedOutputs / kPanelColumns;
  alignas(64) thread_local uint8_t turned[kTurnedOutputs * kPanelColumns * sizeof(float)];
  bool is_added = product.is_added;
  for (size_t panel = 0; panel < product.num_panels; panel += kMaxPanels) {
    const size_t num_panels = std::min(kMaxPanels, product.num_panels - panel);
    kernels.turn({product.format, product.panels + panel * product.panel_stride,
                  product.panel_stride, num_panels, product.first_k, product.num_k, turned});
    Operand d_y = product.d_y;
    d_y.data += panel * kPanelColumns * gradient_bytes(product.format);
    kernels.linear({
        .format = gradient_format(product.format),
        .size = num_panels * kPanelColumns,
        .x = d_y,
        .first_row = 0,
        .num_rows = product.num_rows,
        .panel = turned,
        .bias = nullptr,
        .out = product.out,
        .is_bf16 = false,
        .is_added = is_added,
        .out_stride = product.out_stride,
        .num_columns = product.num_columns,
        .row_ids = product.row_ids});
    is_added = true;
  }
}

}  // namespace tandem
