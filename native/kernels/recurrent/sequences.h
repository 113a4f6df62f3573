// Running the sequences of a step over the threads of a pool, and carrying the inputs of their convolutions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/recurrent/rows.h"

namespace tandem {

// Number of floats of state over which all tokens pass together, below which waking a thread costs
// more than it saves.
inline constexpr size_t kMinSharedFloats = 128 << 10;
// Least number of work items per thread, so that no thread waits long for the last item.
inline constexpr size_t kItemsPerThread = 2;

inline size_t count_rows(const SequenceRows& rows) {
  return rows.num_sequences == 0 ? 0 : static_cast<size_t>(rows.query_start[rows.num_sequences]);
}
inline size_t count_tokens(const SequenceRows& rows, size_t sequence) {
  return static_cast<size_t>(rows.query_start[sequence + 1] - rows.query_start[sequence]);
}

// Returns the sequences that have tokens, long ones first, because an item that starts last should
// be short.
inline std::vector<size_t> list_longest_first(const SequenceRows& rows) {
  std::vector<size_t> sequences;
  for (size_t s = 0; s < rows.num_sequences; ++s)
    if (count_tokens(rows, s) > 0) sequences.push_back(s);
  std::stable_sort(sequences.begin(), sequences.end(), [&](size_t one, size_t other) {
    return count_tokens(rows, one) > count_tokens(rows, other);
  });
  return sequences;
}

// Runs `kernel(item, scratch)` on each item of `plan(num_threads)`; `scratch` is memory of the
// running thread, of `scratch_size` floats.
template <class Plan, class Kernel>
Status run_items(const char* where, ThreadPool* pool, size_t scratch_size, const Plan& plan,
                 const Kernel& kernel) {
  const size_t num_threads = pool == nullptr ? 1 : static_cast<size_t>(pool->num_threads());
  scratch_size = (scratch_size + 15) / 16 * 16;
  const std::unique_ptr<float[]> scratch(new (std::nothrow) float[num_threads * scratch_size + 16]);
  if (scratch == nullptr)
    return Error{Code::kCapacity, where,
                 "no memory for " + std::to_string(num_threads) + " threads' scratch", ""};
  float* const first = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64 / 4;
  const auto items = plan(num_threads);
  const auto run = [&](size_t begin, size_t end, int thread_id) {
    float* own = first + static_cast<size_t>(thread_id) * scratch_size;
    for (size_t i = begin; i < end; ++i) kernel(items[i], own);
  };
  if (pool != nullptr) return pool->parallel_for(items.size(), 1, run);
  run(0, items.size(), 0);
  return {};
}

// Stores in each sequence's slot the last inputs of its convolution, which its next token needs.
inline void carry_inputs(const SequenceRows& rows, size_t channels, size_t conv_width) {
  const size_t kept = conv_width - 1;
  const size_t item_bytes = float_bytes(rows.type), row = channels * item_bytes;
  for (size_t s = 0; s < rows.num_sequences; ++s) {
    const size_t end = static_cast<size_t>(rows.query_start[s + 1]);
    const size_t count = std::min(kept, count_tokens(rows, s));
    char* carried = static_cast<char*>(rows.carried) +
                    static_cast<size_t>(rows.slots[s]) * rows.carried_stride * item_bytes;
    if (count < kept) std::memmove(carried, carried + count * row, (kept - count) * row);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(carried + (kept - count + i) * row,
                  static_cast<const char*>(rows.x) + (end - count + i) * rows.x_stride * item_bytes,
                  row);
  }
}

}  // namespace tandem
