// Low-rank adapters of a matrix (LoRA): what several adapters add to their rows of one product.
//
// A row's change is, for each part of its adapter, scale * (x down^T) up: a sum over the inputs in
// 16 virtual lanes, then a sum over the rank in ascending order, both in fp32. So a row has the same
// bits alone and in company, for any number of threads and on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/vectors/float_type.h"
#include "kernels/row_ops/row_ops.h"

namespace tandem {

inline constexpr size_t kLoraColumns = 64;

// The LoRA factors of one adapter for consecutive outputs of one head. Pointers are borrowed.
struct LoraPart {
  const void* down = nullptr;  // [rank][in_size], contiguous.
  const void* up = nullptr;    // [panels][rank][kLoraColumns], the last panel completed by zeros.
  size_t rank = 0;
  size_t in_size = 0;
  size_t first_output = 0;
  size_t out_size = 0;
  size_t head = 0;
  float scale = 1.0f;
};

// The rows of a batch that use one adapter, and the adapter's factors.
struct LoraGroup {
  const int64_t* rows = nullptr;
  size_t num_rows = 0;
  const LoraPart* parts = nullptr;
  size_t num_parts = 0;
};

// A product to which adapters are applied: its input, and its sums so far. Strides count items. A
// matrix without heads has one head.
struct LoraTask {
  const void* x = nullptr;
  size_t x_stride = 0;
  size_t x_head_stride = 0;
  FloatType type = FloatType::kFloat32;  // Of x and of the parts.
  float* sums = nullptr;  // The product without adapters; the changes are added to it.
  size_t sums_stride = 0;
  size_t sums_head_stride = 0;
  // Destination to which the sums of all rows are written at the end, rounded once; null: the sums
  // are the result.
  void* out = nullptr;
  size_t out_stride = 0;
  size_t out_head_stride = 0;
  FloatType out_type = FloatType::kFloat32;
  bool is_added = false;  // To what `out` holds.
  size_t num_rows = 0;
  size_t num_heads = 1;
  size_t out_size = 0;  // Of a head.
};

// Scratch memory of a call, kept for the next one.
struct LoraScratch {
  std::vector<float> low;
  std::vector<LoraDown> downs;
  std::vector<LoraUp> ups;
};

// Adds the changes of all groups to the task's sums. REQUIRES: what the structs state; rows are
// below num_rows, and each is in at most one group.
Status run_lora(const RowKernels& kernels, ThreadPool* pool, const LoraTask& task,
                const std::vector<LoraGroup>& groups, LoraScratch& scratch);

}  // namespace tandem
