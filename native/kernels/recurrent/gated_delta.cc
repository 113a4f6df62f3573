#include "kernels/recurrent/gated_delta.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "kernels/built_isas.h"
#include "kernels/recurrent/carry.h"
#include "kernels/recurrent/tile.h"

namespace tandem {

extern const RecurrentKernels kRecurrentPlain;
#if defined(__x86_64__)
extern const RecurrentKernels kRecurrentAvx2;
extern const RecurrentKernels kRecurrentAvx512Bw;
#endif

namespace {

// Floats of state that all tokens pass over, below which waking a thread costs more than it saves.
constexpr size_t kMinSharedFloats = 128 << 10;
// Items a thread should find at least, so that none waits long for the last.
constexpr size_t kItemsPerThread = 2;

size_t num_tokens_of(const GatedDeltaTask& task, size_t sequence) {
  return static_cast<size_t>(task.query_start[sequence + 1] - task.query_start[sequence]);
}

// Long sequences first: what starts last should be short. A key head's value heads share its convolution and norms,
// and are split only where there are too few items for the threads.
std::vector<GatedDeltaItem> plan_items(const GatedDeltaTask& task, size_t num_threads) {
  std::vector<size_t> sequences;
  for (size_t s = 0; s < task.num_sequences; ++s)
    if (num_tokens_of(task, s) > 0) sequences.push_back(s);
  std::stable_sort(sequences.begin(), sequences.end(), [&](size_t one, size_t other) {
    return num_tokens_of(task, one) > num_tokens_of(task, other);
  });
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
  const size_t num_rows =
      task.num_sequences == 0 ? 0 : static_cast<size_t>(task.query_start[task.num_sequences]);
  if (num_rows == 0) return {};
  if (num_rows * state_size_of(task.shape) < kMinSharedFloats) pool = nullptr;
  const size_t num_threads = pool == nullptr ? 1 : static_cast<size_t>(pool->num_threads());
  const size_t scratch_size = (gated_delta_scratch(task.shape) + 15) / 16 * 16;
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[num_threads * scratch_size + 16]);
  if (scratch == nullptr)
    return Error{Code::kCapacity, "kernels.gated_delta",
                 "no memory for " + std::to_string(num_threads) + " threads' scratch", ""};
  float* const first = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64 / 4;
  const std::vector<GatedDeltaItem> items = plan_items(task, num_threads);
  const auto run = [&](size_t begin, size_t end, int thread_id) {
    float* own = first + static_cast<size_t>(thread_id) * scratch_size;
    for (size_t i = begin; i < end; ++i) kernels.gated_delta(task, items[i], own);
  };
  if (pool == nullptr) {
    run(0, items.size(), 0);
  } else {
    const Status status = pool->parallel_for(items.size(), 1, run);
    if (!status.is_ok()) return status;
  }
  carry_inputs({
      .type = task.type,
      .x = task.x,
      .x_stride = task.x_stride,
      .carried = task.carried,
      .carried_stride = task.carried_stride,
      .channels = num_channels_of(task.shape),
      .conv_width = task.shape.conv_width,
      .query_start = task.query_start,
      .slots = task.slots,
      .num_sequences = task.num_sequences});
  return {};
}

}  // namespace tandem
