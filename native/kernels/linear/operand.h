// What every operator over packed weights needs around the kernels: their table for an ISA, scratch
// memory, coded activations, and the ceilings of benchmarks.
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

// Memory that grows and stays, one per calling thread: a layer's scratch is the next layer's, and
// fresh pages would cost more than the work of a small batch.
class Arena {
 public:
  // Forgets what was taken. Errors: kCapacity.
  Status reserve(size_t size_bytes);
  // REQUIRES: reserved, each size rounded up to 64 bytes.
  uint8_t* take(size_t size_bytes);

 private:
  std::unique_ptr<AlignedBuffer> buffer_;
  size_t used_ = 0;
};

// Bytes of an operand of `rows` rows of `row_size` elements, whole groups; and one taken.
size_t operand_bytes(const WeightFormat& format, size_t rows, size_t row_size);
Operand take_operand(Arena& arena, const WeightFormat& format, size_t rows, size_t row_size);

// Codes rows of activations, on the calling thread where there are few.
Status prepare_rows(ThreadPool& pool, const PackedKernels& kernels, const PrepareTask& task);

// What a call could reach at best, for benchmarks: reads memory; performs multiply-adds with the
// format's dot product.
Status read_packed(ThreadPool& pool, const PackedKernels& kernels, const uint8_t* data,
                   size_t size_bytes);
Status multiply_packed(ThreadPool& pool, const PackedKernels& kernels, const WeightFormat& format,
                       size_t num_macs);

}  // namespace tandem
