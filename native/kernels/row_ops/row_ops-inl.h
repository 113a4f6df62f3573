// The body of the row operators, compiled once per ISA; see row_ops.h for what they do.
//
// Sums have one order over 64 virtual lanes, and products and sums are rounded apart, so results
// are bitwise the same whatever the width of a register.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/row_ops/row_ops.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/vectors/vec_float-inl.h"

#include "kernels/row_ops/erf-inl.h"

#include "kernels/row_ops/gelu-inl.h"

#include "kernels/vectors/rows-inl.h"

template <class T>
inline void scale_row(T* out, const T* x, float factor, const T* weight, float offset,
                      size_t size) {
  const F32 factors = set_f32(factor), offsets = set_f32(offset);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store_narrow(out + i, load_wide(x + i) * factors * (load_wide(weight + i) + offsets));
  for (; i < size; ++i)
    narrow_one(out + i, widen_one(x[i]) * factor * (widen_one(weight[i]) + offset));
}

template <class T, class X>
inline void add_row(T* residual, const X* x, size_t size) {
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store_narrow(residual + i, load_wide(residual + i) + load_wide(x + i));
  for (; i < size; ++i) narrow_one(residual + i, widen_one(residual[i]) + widen_one(x[i]));
}

template <class T>
void norm_rows(const NormTask& task, size_t begin, size_t end) {
  const T* weight = static_cast<const T*>(task.weight);
  for (size_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(task.x) + row * task.x_stride;
    if (task.residual != nullptr) {
      T* residual = static_cast<T*>(task.residual) + row * task.residual_stride;
      if (task.x_type == task.type)
        add_row(residual, x, task.size);
      else if (task.x_type == FloatType::kFloat32)
        add_row(residual, static_cast<const float*>(task.x) + row * task.x_stride, task.size);
      else
        add_row(residual, static_cast<const uint16_t*>(task.x) + row * task.x_stride, task.size);
      x = residual;
    }
    T* out = static_cast<T*>(task.out) + row * task.out_stride;
    scale_row(out, x, inverse_rms(x, task.size, task.eps), weight, task.weight_offset, task.size);
  }
}

void norm(const NormTask& task, size_t begin, size_t end) {
  if (task.type == FloatType::kFloat32) return norm_rows<float>(task, begin, end);
  norm_rows<uint16_t>(task, begin, end);
}

// Rotates the first `2 * half` items of a head and multiplies all items with the norm's factor and
// weight; a factor of 1 without a weight changes nothing.
template <class T>
inline void rotate_head(T* x, const float* scaled, const T* cos, const T* sin, size_t half,
                        size_t size) {
  size_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load_f32(scaled + i), b = load_f32(scaled + half + i);
    const F32 c = load_wide(cos + i), s = load_wide(sin + i);
    store_narrow(x + i, a * c - b * s);
    store_narrow(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = scaled[i], b = scaled[half + i];
    const float c = widen_one(cos[i]), s = widen_one(sin[i]);
    narrow_one(x + i, a * c - b * s);
    narrow_one(x + half + i, b * c + a * s);
  }
  for (i = 2 * half; i < size; ++i) narrow_one(x + i, scaled[i]);
}

template <class T>
void head_rows(const HeadsTask& task, size_t begin, size_t end) {
  const size_t size = task.head_dim, half = task.rotary_size / 2;
  float scaled[kMaxHeadDim];
  for (size_t row = begin; row < end; ++row) {
    const T* cos = static_cast<const T*>(task.cos) + row * task.angle_stride;
    const T* sin = static_cast<const T*>(task.sin) + row * task.angle_stride;
    for (size_t head = 0; head < task.num_q_heads + task.num_k_heads; ++head) {
      T* x = static_cast<T*>(task.x) + row * task.x_stride + head * size;
      const void* weights = head < task.num_q_heads ? task.q_weight : task.k_weight;
      if (weights != nullptr) {
        // The normed head is not rounded to its type before the rotation.
        const T* weight = static_cast<const T*>(weights);
        const F32 factors = set_f32(inverse_rms(x, size, task.eps));
        const F32 offsets = set_f32(task.weight_offset);
        size_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
          store_f32(scaled + i, load_wide(x + i) * factors * (load_wide(weight + i) + offsets));
        for (; i < size; ++i)
          scaled[i] = widen_one(x[i]) * factors[0] * (widen_one(weight[i]) + task.weight_offset);
      } else {
        size_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store_f32(scaled + i, load_wide(x + i));
        for (; i < size; ++i) scaled[i] = widen_one(x[i]);
      }
      rotate_head(x, scaled, cos, sin, half, size);
    }
  }
}

void heads(const HeadsTask& task, size_t begin, size_t end) {
  if (task.type == FloatType::kFloat32) return head_rows<float>(task, begin, end);
  head_rows<uint16_t>(task, begin, end);
}

#include "kernels/attention/latents-inl.h"

template <GateKind kKind>
TANDEM_INLINE inline F32 activate(F32 x) {
  if constexpr (kKind == GateKind::kSilu) return x * sigmoid(x);
  if constexpr (kKind == GateKind::kGeluTanh) return gelu_tanh(x);
  if constexpr (kKind == GateKind::kSigmoid) return sigmoid(x);
  return gelu_erf(x);
}

template <GateKind kKind, class T>
void gate_rows(const GateTask& task, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(task.gate) + row * task.gate_stride;
    const T* up = static_cast<const T*>(task.up) + row * task.up_stride;
    T* out = static_cast<T*>(task.out) + row * task.out_stride;
    F32 scale = set_f32(1.0f);
    if (task.row_gate != nullptr)
      scale = sigmoid(set_f32(
          widen_one(static_cast<const T*>(task.row_gate)[row * task.row_gate_stride])));
    size_t i = 0;
    // A factor of 1 changes no bit.
    for (; i + kLanes <= task.size; i += kLanes) {
      const F32 x = load_wide(gate + i);
      store_narrow(out + i, activate<kKind>(x) * load_wide(up + i) * scale);
    }
    if (i == task.size) continue;
    float x[kLanes], y[kLanes];
    load_tail(x, gate + i, task.size - i, kLanes);
    load_tail(y, up + i, task.size - i, kLanes);
    store_f32(x, activate<kKind>(load_f32(x)) * load_f32(y) * scale);
    for (size_t j = 0; i + j < task.size; ++j) narrow_one(out + i + j, x[j]);
  }
}

template <GateKind kKind>
void gate_typed(const GateTask& task, size_t begin, size_t end) {
  if (task.type == FloatType::kFloat32) return gate_rows<kKind, float>(task, begin, end);
  gate_rows<kKind, uint16_t>(task, begin, end);
}

void gate(const GateTask& task, size_t begin, size_t end) {
  if (task.kind == GateKind::kSilu) return gate_typed<GateKind::kSilu>(task, begin, end);
  if (task.kind == GateKind::kGeluTanh) return gate_typed<GateKind::kGeluTanh>(task, begin, end);
  if (task.kind == GateKind::kSigmoid) return gate_typed<GateKind::kSigmoid>(task, begin, end);
  gate_typed<GateKind::kGeluErf>(task, begin, end);
}

void soft_cap(const SoftCapTask& task, size_t begin, size_t end) {
  const F32 cap = set_f32(task.cap);
  for (size_t row = begin; row < end; ++row) {
    float* x = task.x + row * task.stride;
    size_t i = 0;
    for (; i + kLanes <= task.size; i += kLanes)
      store_f32(x + i, tanh_of(load_f32(x + i) / cap) * cap);
    if (i == task.size) continue;
    float tail[kLanes];
    load_tail(tail, x + i, task.size - i, kLanes);
    store_f32(tail, tanh_of(load_f32(tail) / cap) * cap);
    for (size_t j = 0; i + j < task.size; ++j) x[i + j] = tail[j];
  }
}

// The router scores of one row, filled up to whole blocks with -inf.
struct RouterRow {
  float logits[kMaxRouterExperts + kBlock];
  float scores[kMaxRouterExperts + kBlock];
  float choices[kMaxRouterExperts + kBlock];
};

// Merges choices[begin, end) into `best`, the ids of the `count` largest so far, best first, of
// which there are `num_best`; returns the new number. Of equal choices the lower id comes first.
inline size_t keep_best(const float* choices, size_t begin, size_t end, int64_t* best,
                        size_t num_best, size_t count) {
  for (size_t e = begin; e < end; ++e) {
    const float choice = choices[e];
    if (num_best == count && !(choice > choices[best[count - 1]])) continue;
    size_t place = num_best < count ? num_best : count - 1;
    while (place > 0 && choice > choices[best[place - 1]]) {
      best[place] = best[place - 1];
      --place;
    }
    best[place] = static_cast<int64_t>(e);
    if (num_best < count) ++num_best;
  }
  return num_best;
}

// Writes the ids of the groups whose experts may be chosen, ascending; returns the number of
// experts in a group.
inline size_t choose_groups(const RouterTask& task, const float* choices, int64_t* groups) {
  const size_t size = task.num_experts / task.num_groups;
  float sums[kMaxRouterExperts];
  for (size_t g = 0; g < task.num_groups; ++g) {
    int64_t best[2] = {};
    const size_t found =
        keep_best(choices, g * size, (g + 1) * size, best, 0, task.num_group_choices);
    sums[g] = choices[best[0]] + (found > 1 ? choices[best[1]] : 0.0f);
  }
  int64_t best[kMaxRouterExperts];
  keep_best(sums, 0, task.num_groups, best, 0, task.num_top_groups);
  for (size_t i = 0; i < task.num_top_groups; ++i) {
    size_t place = i;
    for (; place > 0 && groups[place - 1] > best[i]; --place) groups[place] = groups[place - 1];
    groups[place] = best[i];
  }
  return size;
}

// Writes exp(logit - largest) of all logits to the row's scores; returns their sum in the fixed
// order of blocks.
inline float exponentiate(RouterRow& row, size_t padded) {
  F32 largest[kBlockVectors], sums[kBlockVectors];
  for (size_t v = 0; v < kBlockVectors; ++v) largest[v] = set_f32(-kInfinity), sums[v] = zero_f32();
  for (size_t e = 0; e < padded; e += kBlock)
    for (size_t v = 0; v < kBlockVectors; ++v)
      largest[v] = at_least(largest[v], load_f32(row.logits + e + v * kLanes));
  const F32 top = set_f32(max_block(largest));
  for (size_t e = 0; e < padded; e += kBlock)
    for (size_t v = 0; v < kBlockVectors; ++v) {
      const F32 weight = exp_nonpositive(load_f32(row.logits + e + v * kLanes) - top);
      store_f32(row.scores + e + v * kLanes, weight);
      sums[v] = sums[v] + weight;
    }
  return sum_block(sums);
}

template <class T>
inline bool load_logits(RouterRow& row, const T* logits, size_t count, size_t padded) {
  bool has_nan = false;
  for (size_t e = 0; e < count; ++e) {
    const float x = widen_one(logits[e]);
    has_nan |= x != x;
    row.logits[e] = x;
  }
  for (size_t e = count; e < padded; ++e) row.logits[e] = -kInfinity;
  return has_nan;
}

template <class T>
inline void write_weights(const RouterTask& task, size_t row, const float* weights) {
  T* out = static_cast<T*>(task.weights) + row * task.top_k;
  for (size_t i = 0; i < task.top_k; ++i) narrow_one(out + i, weights[i]);
}

inline void weigh(const RouterTask& task, RouterRow& row, float total, const int64_t* ids,
                  float* weights) {
  const bool is_softmax =
      task.scoring == Scoring::kSoftmax || task.scoring == Scoring::kSoftmaxNormalised;
  const bool is_normalised =
      task.scoring == Scoring::kSoftmaxNormalised || task.scoring == Scoring::kSigmoidNormalised;
  if (is_normalised) {
    // The sum begins at a small value, as in DeepSeek-V3, so that a sum of zeros is no divisor.
    total = is_softmax ? 0.0f : 1e-20f;
    for (size_t i = 0; i < task.top_k; ++i) total += row.scores[ids[i]];
  } else if (!is_softmax) {
    total = 1.0f;
  }
  for (size_t i = 0; i < task.top_k; ++i)
    weights[i] = row.scores[ids[i]] / total * task.weight_scale;
}

void route_row(const RouterTask& task, size_t index, RouterRow& row) {
  const size_t count = task.num_experts, padded = (count + kBlock - 1) / kBlock * kBlock;
  const size_t first = index * count;
  const bool has_nan =
      task.logits_type == FloatType::kFloat32
          ? load_logits(row, static_cast<const float*>(task.logits) + first, count, padded)
          : load_logits(row, static_cast<const uint16_t*>(task.logits) + first, count, padded);
  int64_t* ids = task.ids + index * task.top_k;
  float weights[kMaxTopK];
  if (has_nan) {
    for (size_t i = 0; i < task.top_k; ++i) {
      ids[i] = static_cast<int64_t>(i);
      weights[i] = __builtin_nanf("");
    }
  } else {
    float total = 0.0f;
    if (task.scoring == Scoring::kSoftmax || task.scoring == Scoring::kSoftmaxNormalised) {
      total = exponentiate(row, padded);
      // Order experts by their logits, since the exponential may round different logits to equal
      // scores.
      for (size_t e = 0; e < count; ++e)
        row.choices[e] = row.logits[e] + (task.bias == nullptr ? 0.0f : task.bias[e]);
    } else {
      for (size_t e = 0; e < padded; e += kLanes)
        store_f32(row.scores + e, sigmoid(load_f32(row.logits + e)));
      for (size_t e = 0; e < count; ++e)
        row.choices[e] = row.scores[e] + (task.bias == nullptr ? 0.0f : task.bias[e]);
    }
    if (task.num_groups == 1) {
      keep_best(row.choices, 0, count, ids, 0, task.top_k);
    } else {
      int64_t groups[kMaxRouterExperts];
      const size_t size = choose_groups(task, row.choices, groups);
      size_t found = 0;
      for (size_t i = 0; i < task.num_top_groups; ++i) {
        const size_t begin = static_cast<size_t>(groups[i]) * size;
        found = keep_best(row.choices, begin, begin + size, ids, found, task.top_k);
      }
    }
    weigh(task, row, total, ids, weights);
  }
  if (task.weights_type == FloatType::kFloat32)
    write_weights<float>(task, index, weights);
  else
    write_weights<uint16_t>(task, index, weights);
}

void route(const RouterTask& task, size_t begin, size_t end) {
  RouterRow row;
  for (size_t index = begin; index < end; ++index) route_row(task, index, row);
}

#include "kernels/linear/lora-inl.h"

}  // namespace

extern const RowKernels TANDEM_ROW_KERNELS;
const RowKernels TANDEM_ROW_KERNELS = {norm,  heads,      latents,   gate,   soft_cap,
                                       route, round_sums, lora_down, lora_up};

}  // namespace tandem
