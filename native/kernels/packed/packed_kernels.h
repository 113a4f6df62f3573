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

// Rows of activations in the form in which they are multiplied with packed weights. For float
// formats: values only, fp32 for fp32 weights, else bf16. For integer formats: int8 codes, one
// scale per group, and the terms that undo the offset of the weights' codes. Columns beyond the
// size of the rows, up to row_size, are zero.
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
  // With heads, row h * head_rows + t of the operand is head h of token t, and strides count items.
  // 0: the rows have no heads.
  size_t head_rows = 0;
  size_t head_stride = 0;
  size_t token_stride = 0;
};

// The activation function between gate, up and down: h = f(g) * (u + up_offset), where g =
// min(gate, limit), u = up clamped to +-limit, and f(g) is g * sigmoid(alpha * g) or one of the
// GELUs.
enum class ActivationKind : int32_t { kSilu, kGeluErf, kGeluTanh };
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float alpha = 1.0f;  // kSilu only.
  float limit = __builtin_inff();
  float up_offset = 0.0f;
};

// Computes h[rows, columns] = activation(x gate^T + gate_bias, x up^T + up_bias), in the form of
// the down projection's operand.
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
  // For training, arrays [rows of h][gate, up][kept_columns] from the block's first column on;
  // null: none. `delta` is added before the activation; `kept` receives what the activation sees,
  // in bf16 or, for fp32 weights, in fp32.
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

// Computes out[token, columns] = sum over experts of weight * (h down^T + bias), in the given order
// of experts.
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

// Computes out[rows, columns] = x panel^T + bias, or adds this to what `out` holds.
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
  // Indexes of the rows of x, if these are not consecutive; the rows of `out` then begin at 0.
  const int32_t* row_ids = nullptr;
};

// Quantizes into one panel the outputs [first_row, first_row + kPanelColumns) of a matrix, fewer at
// its end, and of these the inputs [first_k, last_k). Scales of rows and of blocks are computed
// over the whole matrix.
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

// Number of outputs of a matrix that are turned (transposed) at a time for the backward pass, whose
// products sum over outputs. A turned panel has kPanelColumns inputs of the matrix as its outputs;
// it is in fp32 for an fp32 matrix, else in bf16, to which weights are rounded once. 1024 outputs
// are a panel of 128 KiB in bf16, which fits in L2.
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

// Number of outputs that are dequantized together if one of them is wanted: the lanes of the widest
// vector.
inline constexpr size_t kRowColumns = 16;

// Dequantizes inputs [first_k, first_k + num_k) of a panel, whole steps, or chunks, of the format.
struct WidenTask {
  WeightFormat format;
  const uint8_t* panel;
  size_t first_k;  // A multiple of 32; of kMaxGroupSize for more than 32 inputs, and at most as many.
  size_t num_k;
  float* out;      // [num_k][64 outputs], or [num_k][kRowColumns] from `first_column` on.
  bool is_narrow = false;
  size_t first_column = 0;  // A multiple of kRowColumns.
};

// Computes, from the gradient of h = f(gate) * (up + up_offset), those of gate, up and the router
// weights, for kPanelColumns columns of some rows.
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
  // Packs a panel. Returns an output whose weights the format cannot hold, and leaves the panel
  // undefined; -1 if all fit.
  int64_t (*pack)(const PackTask& task);
  // Adds the parts in their order: out[i] = parts[0][i] + parts[1][i] + ...
  void (*add_parts)(const float* const* parts, size_t num_parts, size_t size, float* out);
  // Bounds of a thread's speed, for benchmarks: reading memory, and multiplying registers with the
  // format's dot product. The results only keep the compiler from removing the work.
  int32_t (*read_memory)(const uint8_t* data, size_t size_bytes);
  int32_t (*multiply_registers)(const WeightFormat& format, size_t num_steps);
  // Kernels of the backward pass.
  void (*turn)(const TurnTask& task);
  void (*activate_back)(const ActivateBackTask& task);
  // Dequantizes weights.
  void (*widen)(const WidenTask& task);
};

// Numbers of multiply-adds in one step of multiply_registers, for int8, bf16 and fp32.
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
