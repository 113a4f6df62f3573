// The table of functions that each ISA's variant of the expert kernels fills, and their arguments.
//
// Plain data only, no inline functions: the variants are compiled with flags of their ISA, and a
// shared inline function might be linked in the copy that only the wide machine can run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weight_format.h"

namespace tandem {

// Rows ready to be multiplied with packed weights. bf16: values only. Integer formats: int8 codes,
// one scale per group, and what undoes the offset of the weights' codes.
struct Operand {
  uint8_t* data;         // [rows][row_bytes]; codes or bf16 values.
  size_t row_bytes;
  size_t num_groups;     // Groups stored per row.
  float* scales;         // [rows][num_groups]
  int32_t* corrections;  // [rows][num_groups]: -2^(bits-1) * sum of codes; symmetric only.
  float* offsets;        // [rows][num_groups]: scale * sum of codes; with minimum only.
};

struct PrepareTask {
  WeightFormat format;
  const void* x;  // [tokens][size], contiguous.
  bool is_bf16;   // Otherwise fp32.
  size_t size;
  size_t first_row;
  size_t last_row;
  Operand out;
};

// h[rows, columns] = silu(x gate^T) * (x up^T), coded as down's operand.
struct GateUpTask {
  WeightFormat format;
  size_t size;             // K, the hidden size.
  Operand x;
  const int32_t* row_ids;  // The row of x of each pair.
  size_t num_rows;
  const uint8_t* panels;   // Gate and up panels alternate.
  size_t panel_bytes;
  size_t num_panels;       // Covers whole groups of h: at most kMaxBlockPanels.
  Operand h;
  size_t first_row;        // Of h.
  size_t first_column;     // Of h.
};

struct ExpertRows {
  const uint8_t* panel;  // Of this column block.
  size_t first_pair;
  size_t num_pairs;
};

// out[token, columns] = sum over experts of weight * (h down^T), experts in the given order.
struct DownTask {
  WeightFormat format;
  size_t size;                // K, the intermediate size.
  Operand h;
  const ExpertRows* experts;
  size_t num_experts;
  const int32_t* tokens;      // Of each pair.
  const float* weights;       // Of each pair.
  float* out;                 // First column of the block.
  size_t out_stride;
  size_t num_tokens;
  size_t num_columns;         // At most kPanelColumns.
};

inline constexpr size_t kMaxBlockPanels = kMaxGroupSize / kPanelColumns;

struct ExpertKernels {
  void (*prepare)(const PrepareTask& task);
  void (*gate_up)(const GateUpTask& task);
  void (*down)(const DownTask& task);
  // What a thread reaches at best, for benchmarks: reading memory, and multiplying registers with
  // the dot product that the format uses. The results only keep the work from being optimised away.
  int32_t (*read_memory)(const uint8_t* data, size_t size_bytes);
  int32_t (*multiply_registers)(int32_t bits, size_t num_steps);
};

// Multiply-adds per step of multiply_registers.
inline constexpr size_t kIntStepMacs = 12 * 16 * 4;
inline constexpr size_t kBf16StepMacs = 12 * 16 * 2;

extern const ExpertKernels kExpertsPlain;
#if defined(__x86_64__)
extern const ExpertKernels kExpertsAvx2;
extern const ExpertKernels kExpertsAvx512Bw;
extern const ExpertKernels kExpertsAvx512Vnni;
extern const ExpertKernels kExpertsAvx512Bf16;
#endif

}  // namespace tandem
