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
    kernels.linear({gradient_format(product.format), num_panels * kPanelColumns, d_y, 0, product.num_rows, turned,
                    nullptr, product.out, false, is_added, product.out_stride,
                    product.num_columns, product.row_ids});
    is_added = true;
  }
}

}  // namespace tandem
