#include "kernels/state_space/mamba2.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/recurrent/carry.h"
#include "kernels/state_space/mamba2_tile.h"

namespace tandem {
namespace {

// Floats of state that all tokens pass over, below which waking a thread costs more than it saves.
constexpr size_t kMinScanFloats = 128 << 10;
// Items a thread should find at least, so that none waits long for the last.
constexpr size_t kScanItemsPerThread = 2;
// Heads of a group that share one convolution of B and C, at most: a group may have all heads.
constexpr size_t kMostScanHeads = 8;
// Groups of rows of the norm, of which a thread takes so many at a time.
constexpr size_t kScanNormsAtOnce = 8;

size_t num_tokens_of(const Mamba2Task& task, size_t sequence) {
  return static_cast<size_t>(task.query_start[sequence + 1] - task.query_start[sequence]);
}

// Long sequences first: what starts last should be short. A group's heads are split only as far as threads need it.
std::vector<Mamba2Item> plan_items(const Mamba2Task& task, size_t num_threads) {
  std::vector<size_t> sequences;
  for (size_t s = 0; s < task.num_sequences; ++s)
    if (num_tokens_of(task, s) > 0) sequences.push_back(s);
  std::stable_sort(sequences.begin(), sequences.end(), [&](size_t one, size_t other) {
    return num_tokens_of(task, one) > num_tokens_of(task, other);
  });
  const size_t heads = task.shape.num_heads, group = heads / task.shape.num_groups;
  size_t step = std::min(group, kMostScanHeads);
  while (step > 1 && sequences.size() * (heads / step) < kScanItemsPerThread * num_threads) step /= 2;
  std::vector<Mamba2Item> items;
  for (const size_t sequence : sequences)
    for (size_t first = 0; first < heads; first += group)
      for (size_t head = first; head < first + group; head += step)
        items.push_back({sequence, first / group, head, std::min(head + step, first + group)});
  return items;
}

}  // namespace

size_t mamba2_scratch(const Mamba2Shape& shape) { return tile_floats(shape); }

Status run_mamba2(const StateSpaceKernels& kernels, ThreadPool* pool, const Mamba2Task& task) {
  const size_t num_rows =
      task.num_sequences == 0 ? 0 : static_cast<size_t>(task.query_start[task.num_sequences]);
  if (num_rows == 0) return {};
  if (num_rows * state_size_of(task.shape) < kMinScanFloats) pool = nullptr;
  const size_t num_threads = pool == nullptr ? 1 : static_cast<size_t>(pool->num_threads());
  const size_t scratch_size = (mamba2_scratch(task.shape) + 15) / 16 * 16;
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[num_threads * scratch_size + 16]);
  if (scratch == nullptr)
    return Error{Code::kCapacity, "kernels.mamba2",
                 "no memory for " + std::to_string(num_threads) + " threads' scratch", ""};
  float* const first = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64 / 4;
  const std::vector<Mamba2Item> items = plan_items(task, num_threads);
  const auto run = [&](size_t begin, size_t end, int thread_id) {
    float* own = first + static_cast<size_t>(thread_id) * scratch_size;
    for (size_t i = begin; i < end; ++i) kernels.mamba2(task, items[i], own);
  };
  const size_t groups = task.shape.num_groups;
  const auto norm = [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) kernels.mamba2_norm(task, i / groups, i % groups);
  };
  if (pool == nullptr) {
    run(0, items.size(), 0);
    norm(0, num_rows * groups, 0);
  } else {
    Status status = pool->parallel_for(items.size(), 1, run);
    if (status.is_ok()) status = pool->parallel_for(num_rows * groups, kScanNormsAtOnce, norm);
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
