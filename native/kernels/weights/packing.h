// Checks of weight formats, the sizes that follow from them, and packing of panels. weight_format.h
// describes the layout, pack-inl.h does the quantization.
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

// Alignment of packed weights and of scratch memory: a cache line.
inline constexpr size_t kPackedAlignment = 64;
// Largest number of rows of one task. More rows are split, so that one popular expert, or a matrix
// of few outputs, still occupies all threads.
inline constexpr size_t kMaxTaskRows = 192;

constexpr size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// A row-major matrix [rows, columns], borrowed. It has fp32 or bf16 values; or, if there are
// scales, the codes of a format, one per byte; or rows of blocks as in a GGUF file, anywhere in
// memory.
struct MatrixView {
  const void* data = nullptr;
  bool is_bf16 = false;
  size_t rows = 0;
  size_t columns = 0;
  // Scales of codes. For integer formats: fp16 [rows, groups]; for e4m3: fp32, one row for each 128
  // rows; for e2m1: fp32 powers of two, [rows, groups]; for NVFP4: e4m3 [rows, groups], without
  // signs.
  const void* scales = nullptr;
  const uint16_t* minima = nullptr;  // fp16 [rows, groups], of formats with minimum: those, or zeros.
  const float* factors = nullptr;  // fp32 [rows], of NVFP4: see weight_format.h.
  // Rows of blocks, of kinds that the format can hold; null: the matrix has values or codes.
  const BlockRow* block_rows = nullptr;
};

constexpr bool operator==(const WeightFormat& a, const WeightFormat& b) {
  return a.bits == b.bits && a.group_size == b.group_size && a.has_minimum == b.has_minimum &&
         a.is_float == b.is_float && a.scale_bits == b.scale_bits && a.table == b.table &&
         a.has_zeros == b.has_zeros;
}

// Checks that there is a kernel for a format. Errors: kUnsupported (no kernel for this combination
// of bits, group size and minimum).
Status check_format(const WeightFormat& format);

// Checks a number of inputs. Errors: kShape (not whole groups, if the format needs them; too large
// for integer sums).
Status check_size(const WeightFormat& format, size_t size, const char* name);

// True if activations are quantized to int8 codes; otherwise they are bf16, or fp32 for fp32
// weights.
bool has_codes(const WeightFormat& format);

// Returns the number of inputs that belong together, because they share a quantization step, a
// scale or a dot product.
size_t unit_size(const WeightFormat& format);

// Returns the number of inputs that a part of a matrix cannot split: a unit, or a superblock, which
// shares fp16 numbers.
size_t span_size(const WeightFormat& format);

// Returns the number of integers for scales and minima in a superblock, each of scale_bits bits; 0
// for formats without superblocks, and if the integers are stored among the codes.
size_t count_levels(const WeightFormat& format);

// Checks the shape of a matrix. Errors: kShape (names both sizes).
Status check_matrix(const MatrixView& matrix, size_t rows, size_t columns, const char* name);

// Returns `size` inputs rounded up to whole groups, as a panel holds them.
size_t padded_size(const WeightFormat& format, size_t size);

// Returns the bytes of a panel's codes, without scales.
size_t code_bytes(const WeightFormat& format, size_t num_inputs);

// panel_bytes returns the bytes of a panel over `size` inputs; group_bytes those of its first
// `num_inputs`, whole groups or superblocks, without the header before all groups.
size_t panel_bytes(const WeightFormat& format, size_t size);
size_t group_bytes(const WeightFormat& format, size_t num_inputs);

// Returns how many of `count` panels, or other pieces that are adjacent in memory, one task should
// take: long streams come faster from memory, but every thread should have several tasks.
size_t pieces_per_task(const ThreadPool& pool, size_t count);

// Returns the number of panels over `size` outputs.
constexpr size_t count_panels(size_t size) { return (size + kPanelColumns - 1) / kPanelColumns; }

// The part of a matrix that becomes one panel: outputs from `first_row` on, inputs [first_k,
// last_k).
struct PanelSource {
  const MatrixView* matrix;
  size_t first_row;
  size_t first_k;
  size_t last_k;
};

// Copies existing codes to the layout of a panel; see code_layout.cc. Errors: kUnsupported (a value
// that is no code of the format, a scale that is not finite), which leave `panel` undefined.
Status lay_out_panel(const WeightFormat& format, const PanelSource& source, uint8_t* panel);

// Does the same as lay_out_panel for rows of GGUF blocks; see block_layout.cc.
Status lay_out_blocks(const WeightFormat& format, const PanelSource& source, uint8_t* panel);

// Packs one panel: quantizes its weights, or lays out its codes. Errors: kUnsupported (a weight
// that is not finite, or too large for a scale), which leave `panel` undefined.
Status pack_panel(const PackedKernels& kernels, const WeightFormat& format,
                  const PanelSource& source, uint8_t* panel);

// Runs `pack_one(i)` for i in [0, num_panels) on all threads; returns the first failure.
Status pack_panels(ThreadPool& pool, size_t num_panels, FunctionRef<Status(size_t)> pack_one);

}  // namespace tandem
