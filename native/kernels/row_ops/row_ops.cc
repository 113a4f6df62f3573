#include "kernels/row_ops/row_ops.h"

#include "kernels/built_isas.h"

namespace tandem {

extern const RowKernels kRowsPlain;
#if defined(__x86_64__)
extern const RowKernels kRowsAvx2;
extern const RowKernels kRowsAvx512Bw;
#endif

namespace {

// Number of items that one thread processes in some microseconds, and for which another thread is
// worth waking.
constexpr size_t kRowChunkItems = 64 * 1024;

// Runs `kernel` on rows of `row_items` items each; threads share the rows if there are enough
// items.
template <class Task>
Status run_rows(void (*kernel)(const Task&, size_t, size_t), ThreadPool* pool, const Task& task,
                size_t row_items) {
  const size_t chunk = kRowChunkItems / (row_items + 1) + 1;
  if (pool == nullptr || task.num_rows < 2 * chunk) {
    kernel(task, 0, task.num_rows);
    return {};
  }
  return pool->parallel_for(task.num_rows, chunk, [&](size_t begin, size_t end, int) {
    kernel(task, begin, end);
  });
}

}  // namespace

const RowKernels& choose_row_kernels(Isa isa) {
#ifdef TANDEM_BUILT_ROW_OPS_AVX512_BW
  if (isa >= Isa::kAvx512Bw) return kRowsAvx512Bw;
#endif
#ifdef TANDEM_BUILT_ROW_OPS_AVX2
  if (isa >= Isa::kAvx2) return kRowsAvx2;
#endif
  static_cast<void>(isa);
  return kRowsPlain;
}

Status run_norm(const RowKernels& kernels, ThreadPool* pool, const NormTask& task) {
  return run_rows(kernels.norm, pool, task, task.size);
}

Status run_heads(const RowKernels& kernels, ThreadPool* pool, const HeadsTask& task) {
  return run_rows(kernels.heads, pool, task,
                  2 * (task.num_q_heads + task.num_k_heads) * task.head_dim);
}

Status run_latents(const RowKernels& kernels, ThreadPool* pool, const LatentsTask& task) {
  return run_rows(kernels.latents, pool, task,
                  task.rank + 2 * (task.num_heads + 1) * task.rotary_size);
}

Status run_gate(const RowKernels& kernels, ThreadPool* pool, const GateTask& task) {
  return run_rows(kernels.gate, pool, task, 2 * task.size);
}

Status run_soft_cap(const RowKernels& kernels, ThreadPool* pool, const SoftCapTask& task) {
  return run_rows(kernels.soft_cap, pool, task, 4 * task.size);
}

Status run_router(const RowKernels& kernels, ThreadPool* pool, const RouterTask& task) {
  return run_rows(kernels.route, pool, task, 32 * task.num_experts);
}

Status run_round(const RowKernels& kernels, ThreadPool* pool, const RoundTask& task) {
  return run_rows(kernels.round, pool, task, task.num_heads * task.size);
}

}  // namespace tandem
