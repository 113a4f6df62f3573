#include "kernels/state_space/mamba2.h"

#include <algorithm>
#include <vector>

#include "kernels/recurrent/sequences.h"
#include "kernels/state_space/mamba2_tile.h"

namespace tandem {
namespace {

// Largest number of heads of a group that share one convolution of B and C in a unit of work; a
// group may have all heads of the layer.
constexpr size_t kMostScanHeads = 8;
// Number of norms (of a group in a row) that a thread takes at a time.
constexpr size_t kScanNormsAtOnce = 8;

// Plans units of work. The heads of a group are split only as far as the number of threads needs
// it.
std::vector<Mamba2Item> plan_items(const Mamba2Task& task, size_t num_threads) {
  const std::vector<size_t> sequences = list_longest_first(task);
  const size_t heads = task.shape.num_heads, group = heads / task.shape.num_groups;
  size_t step = std::min(group, kMostScanHeads);
  while (step > 1 && sequences.size() * (heads / step) < kItemsPerThread * num_threads) step /= 2;
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
  const size_t num_rows = count_rows(task);
  if (num_rows == 0) return {};
  if (num_rows * state_size_of(task.shape) < kMinSharedFloats) pool = nullptr;
  Status status = run_items(
      "kernels.mamba2", pool, mamba2_scratch(task.shape),
      [&](size_t num_threads) { return plan_items(task, num_threads); },
      [&](const Mamba2Item& item, float* scratch) { kernels.mamba2(task, item, scratch); });
  if (!status.is_ok()) return status;
  const size_t groups = task.shape.num_groups;
  const auto norm = [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) kernels.mamba2_norm(task, i / groups, i % groups);
  };
  if (pool != nullptr)
    status = pool->parallel_for(num_rows * groups, kScanNormsAtOnce, norm);
  else
    norm(0, num_rows * groups, 0);
  if (status.is_ok()) carry_inputs(task, num_channels_of(task.shape), task.shape.conv_width);
  return status;
}

}  // namespace tandem
