#include "kernels/state_space/short_conv.h"

#include <algorithm>
#include <vector>

#include "kernels/recurrent/sequences.h"

namespace tandem {
namespace {

// Number of products of weights and inputs below which waking a thread costs more than it saves.
constexpr size_t kMinConvProducts = 256 << 10;

}  // namespace

Status run_short_conv(const StateSpaceKernels& kernels, ThreadPool* pool,
                      const ShortConvTask& task) {
  const size_t num_rows = count_rows(task);
  if (num_rows == 0) return {};
  std::vector<ShortConvItem> items;
  for (size_t s = 0; s < task.num_sequences; ++s)
    for (size_t first = 0; first < task.num_channels; first += kConvBlock)
      if (count_tokens(task, s) > 0)
        items.push_back({s, first, std::min(kConvBlock, task.num_channels - first)});
  const auto run = [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) kernels.short_conv(task, items[i]);
  };
  if (pool == nullptr || num_rows * task.num_channels * task.conv_width < kMinConvProducts) {
    run(0, items.size(), 0);
    return {};
  }
  return pool->parallel_for(items.size(), 1, run);
}

}  // namespace tandem
