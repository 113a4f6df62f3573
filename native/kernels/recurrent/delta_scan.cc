#include "kernels/recurrent/delta_scan.h"

#include <memory>
#include <new>
#include <string>

#include "kernels/recurrent/tile.h"

namespace tandem {
namespace {

// Runs `kernel` on each value head, with scratch memory of the running thread.
template <class Kernel>
Status run_heads_of_scan(ThreadPool* pool, const DeltaScanTask& task, size_t scratch_size,
                         const Kernel& kernel) {
  const size_t num_threads = pool == nullptr ? 1 : static_cast<size_t>(pool->num_threads());
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[num_threads * scratch_size]);
  if (scratch == nullptr)
    return Error{Code::kCapacity, "kernels.scan_delta",
                 "no memory for " + std::to_string(num_threads) + " times " +
                     std::to_string(scratch_size * sizeof(float)) +
                     " bytes: train on shorter sequences, or with fewer threads",
                 ""};
  const auto run = [&](size_t begin, size_t end, int thread_id) {
    for (size_t head = begin; head < end; ++head)
      kernel(head, scratch.get() + static_cast<size_t>(thread_id) * scratch_size);
  };
  if (pool != nullptr) return pool->parallel_for(task.shape.num_v_heads, 1, run);
  run(0, task.shape.num_v_heads, 0);
  return {};
}

}  // namespace

size_t delta_gradients_scratch(const DeltaScanTask& task) {
  return gradient_floats(task.shape, task.num_tokens);
}

Status run_delta_scan(const RecurrentKernels& kernels, ThreadPool* pool,
                      const DeltaScanTask& task) {
  return run_heads_of_scan(pool, task, gated_delta_scratch(task.shape),
                           [&](size_t head, float* scratch) { kernels.scan(task, head, scratch); });
}

Status run_delta_gradients(const RecurrentKernels& kernels, ThreadPool* pool,
                           const DeltaScanTask& task, const DeltaScanGradients& gradients) {
  return run_heads_of_scan(
      pool, task, delta_gradients_scratch(task),
      [&](size_t head, float* scratch) { kernels.gradients(task, gradients, head, scratch); });
}

}  // namespace tandem
