// Weight formats and the sizes that follow from them. What lies where is in weight_format.h; the
// coding itself is in pack-inl.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/threads/function_ref.h"
#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/packed/packed_kernels.h"
#include "kernels/weights/stored_blocks.h"
#include "kernels/weights/weight_format.h"

namespace tandem {

// Of packed weights and of scratch: a cache line.
inline constexpr size_t kPackedAlignment = 64;
// Rows of one task: more are split, so that one popular expert, or a matrix of few outputs, still
// occupies all threads.
inline constexpr size_t kMaxTaskRows = 192;

constexpr size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// A row-major matrix [rows, columns], borrowed: fp32 or bf16 values; where there are scales, the
// codes of a format, one a byte; or rows of blocks as a file has them, anywhere in memory.
struct MatrixView {
  const void* data = nullptr;
  bool is_bf16 = false;
  size_t rows = 0;
  size_t columns = 0;
  // Of codes. Integer formats: fp16 [rows, groups]. e4m3: fp32, a row for 128 rows. e2m1: fp32
  // powers of two, [rows, groups]. NVFP4: e4m3, [rows, groups], without signs.
  const void* scales = nullptr;
  const uint16_t* minima = nullptr;  // fp16 [rows, groups], of formats with minimum: those, or zeros.
  const float* factors = nullptr;  // fp32 [rows], of NVFP4: see weight_format.h.
  // Of blocks; of kinds that the format holds.
  const BlockRow* block_rows = nullptr;
};

constexpr bool operator==(const WeightFormat& a, const WeightFormat& b) {
  return a.bits == b.bits && a.group_size == b.group_size && a.has_minimum == b.has_minimum &&
         a.is_float == b.is_float && a.scale_bits == b.scale_bits && a.table == b.table &&
         a.has_zeros == b.has_zeros;
}

// Errors: kUnsupported (a combination of bits, group size and minimum without a kernel).
Status check_format(const WeightFormat& format);

// Errors: kShape (not whole groups, where the format wants them; too large for integer sums).
Status check_size(const WeightFormat& format, size_t size, const char* name);

// Whether activations are int8 codes; otherwise they are bf16, or fp32 beside fp32 weights.
bool has_codes(const WeightFormat& format);

// Inputs that belong together: they share a step, a scale or a dot product.
size_t unit_size(const WeightFormat& format);

// Inputs that a part of a matrix holds whole: a unit, or the superblock that shares fp16 numbers.
size_t span_size(const WeightFormat& format);

// Integers of scales and minima of a superblock, each of scale_bits bits; 0 without superblocks, and where
// they lie beside the codes.
size_t count_levels(const WeightFormat& format);

// Errors: kShape (names both sizes).
Status check_matrix(const MatrixView& matrix, size_t rows, size_t columns, const char* name);

// Inputs in whole groups: what a panel over `size` inputs holds.
size_t padded_size(const WeightFormat& format, size_t size);

// Bytes of a panel's codes alone.
size_t code_bytes(const WeightFormat& format, size_t num_inputs);

// Bytes of a panel over `size` inputs, and of its first `num_inputs`, whole groups or superblocks,
// without what stands before all groups.
size_t panel_bytes(const WeightFormat& format, size_t size);
size_t group_bytes(const WeightFormat& format, size_t num_inputs);

// Panels, or other pieces that lie side by side in memory, that one task takes where there are
// `count`: long streams come faster from memory, but every thread should have several tasks.
size_t pieces_per_task(const ThreadPool& pool, size_t count);

// Panels over `size` outputs.
constexpr size_t count_panels(size_t size) { return (size + kPanelColumns - 1) / kPanelColumns; }

// A part of a matrix that becomes one panel: outputs from `first_row`, inputs [first_k, last_k).
struct PanelSource {
  const MatrixView* matrix;
  size_t first_row;
  size_t first_k;
  size_t last_k;
};

// Lays out codes that are there already; code_layout.cc. Errors: kUnsupported (what is no code of
// the format, a scale that is not finite); `panel` is then undefined.
Status lay_out_panel(const WeightFormat& format, const PanelSource& source, uint8_t* panel);

// The same of blocks; block_layout.cc.
Status lay_out_blocks(const WeightFormat& format, const PanelSource& source, uint8_t* panel);

// Codes one panel, or lays out its codes. Errors: kUnsupported (a weight is not finite, or beyond
// what a scale can hold); `panel` is then undefined.
Status pack_panel(const PackedKernels& kernels, const WeightFormat& format,
                  const PanelSource& source, uint8_t* panel);

// Runs `pack_one(i)` for i in [0, num_panels) on all threads; returns the first failure.
Status pack_panels(ThreadPool& pool, size_t num_panels, FunctionRef<Status(size_t)> pack_one);

}  // namespace tandem
