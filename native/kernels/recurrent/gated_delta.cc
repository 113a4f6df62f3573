#include "kernels/recurrent/gated_delta.h"

#include <vector>

#include "kernels/built_isas.h"
#include "kernels/recurrent/sequences.h"
#include "kernels/recurrent/tile.h"

namespace tandem {

extern const RecurrentKernels kRecurrentPlain;
#if defined(__x86_64__)
extern const RecurrentKernels kRecurrentAvx2;
extern const RecurrentKernels kRecurrentAvx512Bw;
#endif

namespace {

// Plans units of work. The value heads of a key head share its convolution and norms, so they are
// split only if there would be too few units for the threads.
std::vector<GatedDeltaItem> plan_items(const GatedDeltaTask& task, size_t num_threads) {
  const std::vector<size_t> sequences = list_longest_first(task);
  const size_t group = task.shape.num_v_heads / task.shape.num_k_heads;
  const bool is_split =
      sequences.size() * task.shape.num_k_heads < kItemsPerThread * num_threads;
  const size_t step = is_split ? 1 : group;
  std::vector<GatedDeltaItem> items;
  for (const size_t sequence : sequences)
    for (size_t head = 0; head < task.shape.num_v_heads; head += step)
      items.push_back({sequence, head / group, head, head + step});
  return items;
}

}  // namespace

size_t gated_delta_scratch(const GatedDeltaShape& shape) { return tile_floats(shape); }

const RecurrentKernels& choose_recurrent_kernels(Isa isa) {
#ifdef TANDEM_BUILT_RECURRENT_AVX512_BW
  if (isa >= Isa::kAvx512Bw) return kRecurrentAvx512Bw;
#endif
#ifdef TANDEM_BUILT_RECURRENT_AVX2
  if (isa >= Isa::kAvx2) return kRecurrentAvx2;
#endif
  static_cast<void>(isa);
  return kRecurrentPlain;
}

Status run_gated_delta(const RecurrentKernels& kernels, ThreadPool* pool,
                       const GatedDeltaTask& task) {
  const size_t num_rows = count_rows(task);
  if (num_rows == 0) return {};
  if (num_rows * state_size_of(task.shape) < kMinSharedFloats) pool = nullptr;
  const Status status = run_items(
      "kernels.gated_delta", pool, gated_delta_scratch(task.shape),
      [&](size_t num_threads) { return plan_items(task, num_threads); },
      [&](const GatedDeltaItem& item, float* scratch) { kernels.gated_delta(task, item, scratch); });
  if (status.is_ok()) carry_inputs(task, num_channels_of(task.shape), task.shape.conv_width);
  return status;
}

}  // namespace tandem
