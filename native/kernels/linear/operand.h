// Common parts of the operators over packed weights: the table of kernels for an ISA, scratch
// memory, conversion of activations, and bounds for benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/vectors/isa.h"
#include "kernels/packed/packed_kernels.h"
#include "kernels/weights/weight_format.h"

namespace tandem {

const PackedKernels& packed_kernels(Isa isa);

// Scratch memory of a calling thread, which grows and is kept: the next layer reuses it, because
// fresh pages would cost more than the work of a small batch.
class Arena {
 public:
  // Makes all memory free again, at least `size_bytes`. Errors: kCapacity.
  Status reserve(size_t size_bytes);
  // Returns the next free memory. REQUIRES: `reserve` was called for the sum of all sizes, each
  // rounded up to 64 bytes.
  uint8_t* take(size_t size_bytes);

 private:
  std::unique_ptr<AlignedBuffer> buffer_;
  size_t used_ = 0;
};

// Returns the bytes of an operand with `rows` rows of `row_size` elements, whole groups;
// take_operand places one in an arena.
size_t operand_bytes(const WeightFormat& format, size_t rows, size_t row_size);
Operand take_operand(Arena& arena, const WeightFormat& format, size_t rows, size_t row_size);

// Converts rows of activations to an operand; on the calling thread if the rows are few.
Status prepare_rows(ThreadPool& pool, const PackedKernels& kernels, const PrepareTask& task);

// Bounds of a call's speed, for benchmarks: read_packed reads memory, multiply_packed does
// multiply-adds with the format's dot product.
Status read_packed(ThreadPool& pool, const PackedKernels& kernels, const uint8_t* data,
                   size_t size_bytes);
Status multiply_packed(ThreadPool& pool, const PackedKernels& kernels, const WeightFormat& format,
                       size_t num_macs);

}  // namespace tandem
