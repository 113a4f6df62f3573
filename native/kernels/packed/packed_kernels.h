// The table of functions that each ISA's variant of the kernels over packed weights fills, and
// their arguments.
//
// Plain data only, no inline functions: the variants are compiled with flags of their ISA, and a
// shared inline function might be linked in the copy that only the wide machine can run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weights/weight_format.h"

namespace tandem {

// Rows ready to be multiplied with packed weights. Float formats: values only, fp32 for fp32, else
// bf16. Integer formats:
// int8 codes, one scale per group, and what undoes the offset of the weights' codes. Columns up to
// row_size are zero beyond the size of the rows.
struct Operand {
  uint8_t* data;         // [rows][row_bytes]; codes or values.
  size_t row_size;       // Elements of a row, whole groups.
  size_t row_bytes;
  size_t num_groups;     // Groups stored per row; 0 for float formats.
  float* scales;         // [rows][num_groups]
  int32_t* corrections;  // [rows][num_groups]: -centre * sum of codes; symmetric only.
  float* offsets;        // [rows][num_groups]: scale * sum of codes; with minimum only.
};

struct PrepareTask {
  WeightFormat format;
  const void* x;  // [tokens][size], contiguous, unless there are heads.
  bool is_bf16;   // Otherwise fp32.
  size_t size;
  size_t first_row;
  size_t last_row;
  Operand out;
  // With heads, row h * head_rows + t is head h of token t; strides count items. 0: no heads.
  size_t head_rows = 0;
  size_t head_stride = 0;
  size_t token_stride = 0;
};

// What stands between gate, up and down: h = f(g) * (u + up_offset), where g = min(gate, limit),
// u = up clamped to +-limit, and f(g) is g * sigmoid(alpha * g) or one of the GELUs.
enum class ActivationKind : int32_t { kSilu, kGeluErf, kGeluTanh };
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float alpha = 1.0f;  // kSilu only.
  float limit = __builtin_inff();
  float up_offset = 0.0f;
};

// h[rows, columns] = activation(x gate^T + gate_bias, x up^T + up_bias), coded as down's operand.
struct GateUpTask {
  WeightFormat format;
  Activation activation;
  size_t size;             // K, the hidden size in whole groups.
  Operand x;
  const int32_t* row_ids;  // The row of x of each pair.
  size_t num_rows;
  const uint8_t* panels;   // Gate and up panels alternate.
  size_t panel_bytes;
  size_t num_panels;       // Covers whole groups of h: at most kMaxBlockPanels.
  const float* gate_bias;  // Of the block's columns; null for none.
  const float* up_bias;
  WeightFormat h_format;   // Of the down projection.
  Operand h;               // Without data: nothing is coded.
  size_t first_row;        // Of h.
  size_t first_column;     // Of h.
  // For gradients, [rows of h][gate, up][kept_columns] from the block's first column on; null for
  // none. `delta` is added before the activation; `kept` takes what the activation sees, in the
  // format of gradients.
  const float* delta = nullptr;
  void* kept = nullptr;
  size_t kept_columns = 0;
};

struct ExpertRows {
  const uint8_t* panels;  // Of the first column block; the others follow.
  const float* bias;      // Of the columns; null for none.
  size_t first_pair;
  size_t num_pairs;
};

// out[token, columns] = sum over experts of weight * (h down^T + bias), in the given order.
struct DownTask {
  WeightFormat format;
  size_t size;                // K, the intermediate size in whole groups.
  Operand h;
  const ExpertRows* experts;
  size_t num_experts;
  size_t panel_bytes;
  size_t num_panels;
  const int32_t* tokens;      // Of each pair.
  const float* weights;       // Of each pair.
  float* out;                 // First column of the block.
  size_t out_stride;
  size_t num_tokens;
  size_t num_columns;         // Of the block: more than those of all panels but the last.
  bool is_added = false;      // To what out holds, which is bitwise the sum over more experts.
};

// out[rows, columns] = x panel^T + bias, or added to what is there.
struct LinearTask {
  WeightFormat format;
  size_t size;           // K in whole groups.
  Operand x;
  size_t first_row;
  size_t num_rows;
  const uint8_t* panel;
  const float* bias;     // Of the panel's columns; null for none.
  void* out;             // First column of the panel, row 0; fp32 or bf16.
  bool is_bf16;
  bool is_added;
  size_t out_stride;     // Elements.
  size_t num_columns;    // At most kPanelColumns.
  // Rows of x, where they are not consecutive; the rows of out then begin at 0.
  const int32_t* row_ids = nullptr;
};

// Codes outputs [first_row, first_row + kPanelColumns) of a matrix, fewer at its end, and of these
// the inputs [first_k, last_k). Scales of rows and of blocks are those of the whole matrix.
struct PackTask {
  WeightFormat format;
  const void* weights;  // [num_rows][row_size], fp32 or bf16.
  bool is_bf16;
  size_t num_rows;
  size_t row_size;
  size_t first_row;
  size_t first_k;       // At the start of a group.
  size_t last_k;
  size_t size;          // Inputs of the panel: last_k - first_k in whole groups.
  uint8_t* panel;
};

inline constexpr size_t kMaxBlockPanels = kMaxGroupSize / kPanelColumns;

// A turned panel sums over outputs: kPanelColumns inputs of a matrix as the outputs of a panel of the
// format of gradients: fp32 of a matrix in fp32, else bf16, to which weights are rounded once.
// Outputs that are turned at a time: a panel of 128 KiB in bf16, in L2.
inline constexpr size_t kTurnedOutputs = 1024;

struct TurnTask {
  WeightFormat format;
  const uint8_t* panels;  // 64 outputs each.
  size_t panel_stride;    // Bytes.
  size_t num_panels;
  size_t first_k;         // A multiple of kPanelColumns.
  size_t num_k;           // At most kPanelColumns, whole steps of the format; the rest is zero.
  uint8_t* out;
};

// Outputs whose values are widened together where one of them is wanted: as many as the widest vector
// has lanes.
inline constexpr size_t kRowColumns = 16;

// The values of inputs [first_k, first_k + num_k) of a panel, whole steps, or chunks, of the format.
struct WidenTask {
  WeightFormat format;
  const uint8_t* panel;
  size_t first_k;  // A multiple of 32; of kMaxGroupSize for more than 32 inputs, and at most as many.
  size_t num_k;
  float* out;      // [num_k][64 outputs], or [num_k][kRowColumns] from `first_column` on.
  bool is_narrow = false;
  size_t first_column = 0;  // A multiple of kRowColumns.
};

// From the gradient of h = f(gate) * (up + up_offset) to those of gate, up and the router weights,
// for kPanelColumns columns of some rows.
struct ActivateBackTask {
  Activation activation;
  size_t num_rows;
  bool is_f32;           // Gate, up and their gradients; otherwise bf16.
  const void* gate;      // As GateUpTask kept them.
  const void* up;
  size_t row_stride;     // Of gate, up and their gradients.
  const float* dh;       // [rows][64], without the router weights.
  const float* extra;    // What is added to the weighted dh, or null.
  size_t extra_stride;
  const float* weights;  // Of each row.
  void* d_gate;
  void* d_up;
  float* d_weights;      // Of each row, overwritten with its share.
};

struct PackedKernels {
  void (*prepare)(const PrepareTask& task);
  void (*gate_up)(const GateUpTask& task);
  void (*down)(const DownTask& task);
  void (*linear)(const LinearTask& task);
  // Returns an output whose weights the format cannot hold, or -1. The panel is then undefined.
  int64_t (*pack)(const PackTask& task);
  // Adds the parts in their order: out[i] = parts[0][i] + parts[1][i] + ...
  void (*add_parts)(const float* const* parts, size_t num_parts, size_t size, float* out);
  // What a thread reaches at best, for benchmarks: reading memory, and multiplying registers with
  // the dot product that the format uses. The results only keep the work from being optimised away.
  int32_t (*read_memory)(const uint8_t* data, size_t size_bytes);
  int32_t (*multiply_registers)(const WeightFormat& format, size_t num_steps);
  // Gradients.
  void (*turn)(const TurnTask& task);
  void (*activate_back)(const ActivateBackTask& task);
  // Weights as numbers.
  void (*widen)(const WidenTask& task);
};

// Multiply-adds per step of multiply_registers.
inline constexpr size_t kIntStepMacs = 12 * 16 * 4;
inline constexpr size_t kBf16StepMacs = 12 * 16 * 2;
inline constexpr size_t kF32StepMacs = 12 * 16;

extern const PackedKernels kPackedPlain;
extern const PackedKernels kPackedAmxEmulated;
#if defined(__x86_64__)
extern const PackedKernels kPackedAvx2;
extern const PackedKernels kPackedAvx512Bw;
extern const PackedKernels kPackedAvx512Vnni;
extern const PackedKernels kPackedAvx512Bf16;
extern const PackedKernels kPackedAmx;
#endif

}  // namespace tandem
