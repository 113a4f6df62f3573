// The kernels over packed weights, compiled once per ISA; see packed_kernels.h for what they do.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/packed/packed_kernels.h"
#include "kernels/weights/codebooks/codebooks.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/packed/multiply-inl.h"

#include "kernels/linear/operand-inl.h"

#include "kernels/row_ops/erf-inl.h"

#include "kernels/row_ops/activation-inl.h"

#include "kernels/weights/place_codes-inl.h"

#include "kernels/weights/pack-inl.h"

#include "kernels/packed/backward-inl.h"

// Rows whose gate and up values a task holds in fp32 at a time: 48 x 128 values are 48 KiB, which
// fit in L2.
constexpr size_t kRowChunk = 48;

inline void add_bias(float* rows, size_t num_rows, size_t width, const float* bias) {
  if (bias == nullptr) return;
  for (size_t row = 0; row < num_rows; ++row, rows += width)
    for (size_t i = 0; i < width; i += kLanes)
      store_f32(rows + i, load_f32(rows + i) + load_f32(bias + i));
}

// Adds `delta` (what LoRA adapters contribute) to a row's gate and up, and keeps the values that
// the activation sees, for the backward pass.
void keep_row(const GateUpTask& task, size_t row, float* gate, float* up, size_t width) {
  for (size_t which = 0; which < 2; ++which) {
    const size_t at = (2 * row + which) * task.kept_columns;
    float* values = which == 0 ? gate : up;
    if (task.delta != nullptr)
      for (size_t i = 0; i < width; i += kLanes)
        store_f32(values + i, load_f32(values + i) + load_f32(task.delta + at + i));
    if (task.kept != nullptr && task.format.bits == 32)
      __builtin_memcpy(static_cast<float*>(task.kept) + at, values, width * sizeof(float));
    else if (task.kept != nullptr)
      store_bf16(static_cast<uint16_t*>(task.kept) + at, values, width);
  }
}

void gate_up(const GateUpTask& task) {
  alignas(64) float gate[kRowChunk * kMaxBlockPanels * kPanelColumns];
  alignas(64) float up[kRowChunk * kMaxBlockPanels * kPanelColumns];
  const size_t width = task.num_panels * kPanelColumns;
  for (size_t row = 0; row < task.num_rows; row += kRowChunk) {
    const size_t count = task.num_rows - row < kRowChunk ? task.num_rows - row : kRowChunk;
    const RowList rows{task.row_ids + row, 0};
    const uint8_t* panel = task.panels;
    for (size_t i = 0; i < task.num_panels; ++i) {
      multiply({task.format, task.size, &task.x, rows, panel, gate + i * kPanelColumns, width},
               count);
      panel += task.panel_bytes;
      multiply({task.format, task.size, &task.x, rows, panel, up + i * kPanelColumns, width},
               count);
      panel += task.panel_bytes;
    }
    add_bias(gate, count, width, task.gate_bias);
    add_bias(up, count, width, task.up_bias);
    if (task.delta != nullptr || task.kept != nullptr)
      for (size_t i = 0; i < count; ++i)
        keep_row(task, task.first_row + row + i, gate + i * width, up + i * width, width);
    if (task.h.data == nullptr) continue;
    activate(task.activation, gate, up, count * width);
    for (size_t i = 0; i < count; ++i)
      code_row(task.h_format, gate + i * width, width, task.h, task.first_row + row + i,
               task.first_column);
  }
}

inline void add_scaled(float* out, const float* y, float weight, size_t size) {
  const F32 w = set_f32(weight);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store_f32(out + i, fma(w, load_f32(y + i), load_f32(out + i)));
  for (; i < size; ++i) out[i] = __builtin_fmaf(weight, y[i], out[i]);
}

void down_panel(const DownTask& task, const ExpertRows& expert, size_t panel) {
  alignas(64) float y[kRowChunk * kPanelColumns];
  const size_t column = panel * kPanelColumns;
  const size_t left_columns = task.num_columns - column;
  const size_t num_columns = left_columns < kPanelColumns ? left_columns : kPanelColumns;
  const uint8_t* weights = expert.panels + panel * task.panel_bytes;
  for (size_t row = 0; row < expert.num_pairs; row += kRowChunk) {
    const size_t left = expert.num_pairs - row;
    const size_t count = left < kRowChunk ? left : kRowChunk;
    const size_t pair = expert.first_pair + row;
    multiply({task.format, task.size, &task.h, {nullptr, pair}, weights, y, kPanelColumns}, count);
    add_bias(y, count, kPanelColumns, expert.bias ? expert.bias + column : nullptr);
    for (size_t i = 0; i < count; ++i)
      add_scaled(task.out + static_cast<size_t>(task.tokens[pair + i]) * task.out_stride + column,
                 y + i * kPanelColumns, task.weights[pair + i], num_columns);
  }
}

void down(const DownTask& task) {
  for (size_t token = 0; token < task.num_tokens && !task.is_added; ++token)
    __builtin_memset(task.out + token * task.out_stride, 0, task.num_columns * sizeof(float));
  for (size_t e = 0; e < task.num_experts; ++e)
    for (size_t panel = 0; panel < task.num_panels; ++panel)
      down_panel(task, task.experts[e], panel);
}

// Writes one row of a product to `out`, or adds it there; bf16 is rounded once, after everything is
// summed.
template <class Out>
inline void finish_row(const LinearTask& task, const float* y, Out* out) {
  for (size_t i = 0; i < task.num_columns; ++i) {
    float value = y[i];
    if constexpr (sizeof(Out) == 2) {
      if (task.is_added) value += float_of(uint32_t{out[i]} << 16);
      out[i] = round_to_bf16(value);
    } else {
      out[i] = task.is_added ? out[i] + value : value;
    }
  }
}

void linear(const LinearTask& task) {
  alignas(64) float y[kRowChunk * kPanelColumns];
  for (size_t row = 0; row < task.num_rows; row += kRowChunk) {
    const size_t count = task.num_rows - row < kRowChunk ? task.num_rows - row : kRowChunk;
    const size_t first = task.first_row + row;
    const RowList rows = task.row_ids == nullptr ? RowList{nullptr, first}
                                                 : RowList{task.row_ids + row, 0};
    multiply({task.format, task.size, &task.x, rows, task.panel, y, kPanelColumns}, count);
    add_bias(y, count, kPanelColumns, task.bias);
    for (size_t i = 0; i < count; ++i) {
      const size_t at = ((task.row_ids == nullptr ? first : row) + i) * task.out_stride;
      if (task.is_bf16)
        finish_row(task, y + i * kPanelColumns, static_cast<uint16_t*>(task.out) + at);
      else
        finish_row(task, y + i * kPanelColumns, static_cast<float*>(task.out) + at);
    }
  }
}

void add_parts(const float* const* parts, size_t num_parts, size_t size, float* out) {
  for (size_t i = 0; i < size; ++i) {
    float sum = parts[0][i];
    for (size_t p = 1; p < num_parts; ++p) sum += parts[p][i];
    out[i] = sum;
  }
}

// REQUIRES: size_bytes is a multiple of 256.
int32_t read_memory(const uint8_t* data, size_t size_bytes) {
  constexpr size_t kVectors = 256 / sizeof(I32);
  I32 sum[kVectors];
  for (size_t v = 0; v < kVectors; ++v) sum[v] = set_i32(0);
  for (size_t i = 0; i < size_bytes; i += 256) {
    for (size_t v = 0; v < kVectors; ++v) sum[v] |= load_i32(data + i + v * sizeof(I32));
  }
  for (size_t v = 1; v < kVectors; ++v) sum[0] |= sum[v];
  int32_t first;
  __builtin_memcpy(&first, &sum[0], sizeof first);
  return first;
}

template <class Narrow>
TANDEM_INLINE inline I32 add_narrow_product(I32 sum, I32 w, I32 row) {
  if constexpr (Narrow::kSteps != 0)
    return Narrow::add(sum, Narrow::multiply(w, row));
  else
    return dot(sum, int_weights(w), IntRow{});
}

int32_t multiply_registers(const WeightFormat& format, size_t num_steps) {
  const bool is_narrow =
      has_codes(format) &&
      visit_int_format(format, [](auto f) { return decltype(f)::kNarrowSteps != 0; });
  // Number of independent chains of 16 lanes: twelve hide the latency of every dot product
  // instruction that is used here.
  constexpr size_t kChains = 12;
  constexpr size_t kParts = 16 / kLanes;
  const uint8_t bytes[4] = {1, 2, 3, 4};
  const I32 w = set_i32(static_cast<int32_t>(num_steps) | 0x01010101);
  int32_t result = 0;
  for (size_t part = 0; part < kParts; ++part) {
    I32 ints[kChains];
    F32 floats[kChains];
    for (size_t c = 0; c < kChains; ++c) {
      ints[c] = set_i32(static_cast<int32_t>(c));
      floats[c] = set_f32(static_cast<float>(c));
    }
    for (size_t i = 0; i < num_steps; ++i) {
      if (format.bits == 32)
        for (size_t c = 0; c < kChains; ++c)
          floats[c] = fma(as_f32(w), set_f32(1.0f), floats[c]);
      else if (!has_codes(format))
        for (size_t c = 0; c < kChains; ++c)
          floats[c] = dot(floats[c], bf16_weights(w), bf16_row(bytes));
      else if (is_narrow)
        for (size_t c = 0; c < kChains; ++c)
          ints[c] = add_narrow_product<NarrowSums<15>>(ints[c], w, w);
      else
        for (size_t c = 0; c < kChains; ++c) ints[c] = dot(ints[c], int_weights(w), int_row(bytes));
    }
    for (size_t c = 0; c < kChains; ++c) {
      int32_t word;
      __builtin_memcpy(&word, &ints[c], sizeof word);
      result ^= word;
      __builtin_memcpy(&word, &floats[c], sizeof word);
      result ^= word;
    }
  }
  return result;
}

}  // namespace

const PackedKernels TANDEM_PACKED_KERNELS = {
    prepare,     gate_up,            down, linear,       pack, add_parts,
    read_memory, multiply_registers, turn, activate_back, widen};

}  // namespace tandem
