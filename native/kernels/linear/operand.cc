#include "kernels/linear/operand.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/built_isas.h"
#include "kernels/weights/packing.h"

namespace tandem {
namespace {

// Number of rows below which converting them takes less time than waking the thread pool.
constexpr size_t kMinParallelRows = 8;

// Returns the bytes of an activation in a format whose activations are not quantized.
size_t value_bytes(const WeightFormat& format) { return format.bits == 32 ? 4 : 2; }

}  // namespace

const PackedKernels& packed_kernels(Isa isa) {
  switch (isa) {
#ifdef TANDEM_BUILT_PACKED_AVX2
    case Isa::kAvx2: return kPackedAvx2;
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_BW
    case Isa::kAvx512Bw: return kPackedAvx512Bw;
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_VNNI
    case Isa::kAvx512Vnni: return kPackedAvx512Vnni;
#endif
#ifdef TANDEM_BUILT_PACKED_AVX512_BF16
    case Isa::kAvx512Bf16: return kPackedAvx512Bf16;
#endif
#ifdef TANDEM_BUILT_PACKED_AMX
    case Isa::kAmx: return kPackedAmx;
#endif
#ifdef TANDEM_BUILT_PACKED_AMX_EMULATED
    case Isa::kAmxEmulated: return kPackedAmxEmulated;
#endif
    default: return kPackedPlain;
  }
}

Status Arena::reserve(size_t size_bytes) {
  used_ = 0;
  if (buffer_ && buffer_->size_bytes() >= size_bytes) return {};
  buffer_.reset();
  Result<AlignedBuffer> made = AlignedBuffer::allocate(size_bytes, {});
  if (!made.is_ok()) return made.error();
  buffer_ = std::make_unique<AlignedBuffer>(std::move(made.value()));
  return {};
}

uint8_t* Arena::take(size_t size_bytes) {
  uint8_t* p = buffer_->data() + used_;
  used_ += round_up(size_bytes, kPackedAlignment);
  return p;
}

size_t operand_bytes(const WeightFormat& format, size_t rows, size_t row_size) {
  if (!has_codes(format))
    return round_up(rows * row_size * value_bytes(format), kPackedAlignment);
  return round_up(rows * row_size, kPackedAlignment) +
         2 * round_up(rows * (row_size / unit_size(format)) * 4, kPackedAlignment);
}

Operand take_operand(Arena& arena, const WeightFormat& format, size_t rows, size_t row_size) {
  Operand operand{};
  operand.row_size = row_size;
  operand.row_bytes = row_size * (has_codes(format) ? 1 : value_bytes(format));
  operand.data = arena.take(rows * operand.row_bytes);
  if (!has_codes(format)) return operand;
  operand.num_groups = row_size / unit_size(format);
  const size_t num_words = rows * operand.num_groups;
  operand.scales = reinterpret_cast<float*>(arena.take(num_words * 4));
  uint8_t* extra = arena.take(num_words * 4);
  if (format.has_minimum)
    operand.offsets = reinterpret_cast<float*>(extra);
  else
    operand.corrections = reinterpret_cast<int32_t*>(extra);
  return operand;
}

Status prepare_rows(ThreadPool& pool, const PackedKernels& kernels, const PrepareTask& task) {
  const size_t num_rows = task.last_row - task.first_row;
  const auto run = [&](size_t begin, size_t end, int) {
    PrepareTask share = task;
    share.first_row = task.first_row + begin;
    share.last_row = task.first_row + end;
    kernels.prepare(share);
  };
  if (num_rows >= kMinParallelRows)
    return pool.parallel_for(num_rows, kMinParallelRows / 2, run);
  run(0, num_rows, 0);
  return {};
}

Status read_packed(ThreadPool& pool, const PackedKernels& kernels, const uint8_t* data,
                   size_t size_bytes) {
  constexpr size_t kReadBytes = 256 << 10;
  size_bytes = size_bytes / 256 * 256;
  std::atomic<int32_t> sink{0};
  return pool.parallel_for((size_bytes + kReadBytes - 1) / kReadBytes, 1,
                           [&](size_t begin, size_t end, int) {
                             const size_t first = begin * kReadBytes;
                             const size_t last = std::min(end * kReadBytes, size_bytes);
                             sink += kernels.read_memory(data + first, last - first);
                           });
}

Status multiply_packed(ThreadPool& pool, const PackedKernels& kernels, const WeightFormat& format,
                       size_t num_macs) {
  constexpr size_t kTaskSteps = 4096;
  const size_t step_macs = has_codes(format)     ? kIntStepMacs
                           : format.bits == 32 ? kF32StepMacs
                                               : kBf16StepMacs;
  const size_t num_tasks = (num_macs + step_macs * kTaskSteps - 1) / (step_macs * kTaskSteps);
  // Divide the multiply-adds into tasks of equal size.
  const size_t steps = num_macs / step_macs / std::max<size_t>(num_tasks, 1);
  std::atomic<int32_t> sink{0};
  return pool.parallel_for(num_tasks, 1, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i)
      sink += kernels.multiply_registers(format, steps);
  });
}

}  // namespace tandem
