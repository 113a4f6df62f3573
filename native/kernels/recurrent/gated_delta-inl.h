// The body of the gated delta rule, compiled once per ISA; see gated_delta.h for what it does.
//
// A tile of tokens passes over a panel of the state at a time. Within a tile, the pass that writes one token's update
// also reads the sums that the next token needs: S^T k and S^T q before the decay. Of these follow u and
// o = decay S^T q + (q k) u, so that a token costs one pass. Where items of a key decay apart, the sums are those with
// decayed keys and queries. Tiles change no bit: each element and each column's sum go through the same operations, in
// the order of the key's items, even and odd ones apart.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/recurrent/delta_scan.h"
#include "kernels/recurrent/gated_delta.h"
#include "kernels/recurrent/tile.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/vectors/vec_float-inl.h"

#include "kernels/vectors/rows-inl.h"

#include "kernels/recurrent/convolve-inl.h"

// Computes x = x / sqrt(sum of squares + eps) * scale over `stride` items, of which the last ones
// are zeros.
inline void scale_to_length(float* x, size_t stride, float scale) {
  constexpr float kEps = 1e-6f;  // The families' own.
  const F32 factors = set_f32(1.0f / __builtin_sqrtf(dot_block(x, x, stride) + kEps));
  const F32 scales = set_f32(scale);
  for (size_t i = 0; i < stride; i += kLanes)
    store_f32(x + i, load_f32(x + i) * factors * scales);
}

// Computes the betas of a value head for a tile's tokens, and the decays if the head has one decay
// per token.
template <class T>
inline void compute_gates(const GatedDeltaTask& task, size_t first_row, size_t num_tokens,
                          size_t head, DeltaTile& tile) {
  float a[kDeltaTokens], b[kDeltaTokens];
  const size_t num_decays = task.shape.num_decays;
  for (size_t t = 0; t < kDeltaTokens; ++t) {
    const size_t row = first_row + (t < num_tokens ? t : 0);
    a[t] = widen_one(static_cast<const T*>(task.a)[row * task.a_stride + head * num_decays]);
    b[t] = widen_one(static_cast<const T*>(task.b)[row * task.b_stride + head]);
  }
  for (size_t t = 0; t < kDeltaTokens; t += kLanes)
    store_f32(tile.beta + t, sigmoid(load_f32(b + t)) * set_f32(task.weights.beta_scale));
  if (num_decays > 1) return;
  const F32 rate = set_f32(task.weights.decay_rate[head]);
  const F32 bias = set_f32(task.weights.decay_bias[head]);
  for (size_t t = 0; t < kDeltaTokens; t += kLanes) {
    const F32 rise = softplus(load_f32(a + t) + bias);
    store_f32(tile.decay + t, exp_nonpositive(zero_f32() - rate * rise));
  }
}

// Multiplies the queries and keys of a tile with the decays of their items.
inline void decay_rows(size_t key_stride, size_t num_tokens, DeltaTile& tile) {
  for (size_t i = 0; i < num_tokens * key_stride; i += kLanes) {
    const F32 decay = load_f32(tile.decays + i);
    store_f32(tile.decayed_queries + i, load_f32(tile.queries + i) * decay);
    store_f32(tile.decayed_keys + i, load_f32(tile.keys + i) * decay);
  }
}

// Computes the decays of each key item of a value head for a tile's tokens; items that only fill up
// a row are not used.
template <class T>
inline void compute_decays(const GatedDeltaTask& task, size_t first_row, size_t num_tokens,
                           size_t head, DeltaTile& tile) {
  const size_t size = task.shape.key_dim, key_stride = key_stride_of(task.shape);
  const F32 rate = set_f32(task.weights.decay_rate[head]);
  const float* bias = task.weights.decay_bias + head * size;
  const auto decay = [&](F32 raw) { return exp_nonpositive(zero_f32() - rate * softplus(raw)); };
  for (size_t t = 0; t < num_tokens; ++t) {
    const T* a = static_cast<const T*>(task.a) + (first_row + t) * task.a_stride + head * size;
    float* row = tile.decays + t * key_stride;
    size_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
      store_f32(row + i, decay(load_wide(a + i) + load_f32(bias + i)));
    if (i < size) {
      float raw[kLanes], own[kLanes];
      load_tail(raw, a + i, size - i, kLanes);
      load_tail(own, bias + i, size - i, kLanes);
      store_f32(row + i, decay(load_f32(raw) + load_f32(own)));
      i += kLanes;
    }
    for (; i < key_stride; i += kLanes) store_f32(row + i, zero_f32());
  }
  decay_rows(key_stride, num_tokens, tile);
}

template <class T>
inline void prepare_gates(const GatedDeltaTask& task, size_t first_row, size_t num_tokens,
                          size_t head, DeltaTile& tile) {
  compute_gates<T>(task, first_row, num_tokens, head, tile);
  if (decays_by_item(task.shape)) compute_decays<T>(task, first_row, num_tokens, head, tile);
}

// Number of vectors of state columns that one pass updates together.
inline constexpr size_t kPassVectors = 2;
inline constexpr size_t kPassColumns = kPassVectors * kLanes;

// Sums over the items of a key for the columns of a pass, even and odd items apart.
struct PassSums {
  F32 key[2][kPassVectors], query[2][kPassVectors];
};

enum class Pass { kRead, kUpdateAndRead, kUpdate };

// The decay of a token: the share of the state that it keeps, one for all rows of the state or one
// for each row.
struct HeadDecay {
  static constexpr bool kIsOne = true;
  F32 share;
  static HeadDecay of(const DeltaTile& tile, size_t t, size_t) { return {set_f32(tile.decay[t])}; }
  F32 of_row(size_t) const { return share; }
};
struct ItemDecays {
  static constexpr bool kIsOne = false;
  const float* shares;
  static ItemDecays of(const DeltaTile& tile, size_t t, size_t key_stride) {
    return {tile.decays + t * key_stride};
  }
  F32 of_row(size_t i) const { return set_f32(shares[i]); }
};

// Updates one row of the state and adds it to the sums; `kChain` is 0 for even rows.
template <Pass kPass, int kChain, class Decay>
TANDEM_INLINE inline void pass_row(float* state, Decay decay, const F32 (&update)[kPassVectors],
                                   const float* old_key, const float* key, const float* query,
                                   size_t i, PassSums& sums) {
  float* row = state + i * kStatePanel;
  F32 k = zero_f32(), q = zero_f32(), old_k = zero_f32(), share = zero_f32();
  if constexpr (kPass != Pass::kRead) old_k = set_f32(old_key[i]), share = decay.of_row(i);
  if constexpr (kPass != Pass::kUpdate) k = set_f32(key[i]), q = set_f32(query[i]);
  unroll<kPassVectors>([&](auto index) TANDEM_INLINE {
    constexpr int v = decltype(index)::value;
    F32 s = load_f32(row + v * kLanes);
    if constexpr (kPass != Pass::kRead) {
      s = fma(old_k, update[v], s * share);
      store_f32(row + v * kLanes, s);
    }
    if constexpr (kPass != Pass::kUpdate) {
      sums.key[kChain][v] = fma(s, k, sums.key[kChain][v]);
      sums.query[kChain][v] = fma(s, q, sums.query[kChain][v]);
    }
  });
}

template <Pass kPass, class Decay>
TANDEM_INLINE inline void pass_rows(float* state, size_t size, Decay decay,
                                    const F32 (&update)[kPassVectors], const float* old_key,
                                    const float* key, const float* query, PassSums& sums) {
  unroll<kPassVectors>([&](auto index) TANDEM_INLINE {
    constexpr int v = decltype(index)::value;
    sums.key[0][v] = sums.key[1][v] = sums.query[0][v] = sums.query[1][v] = zero_f32();
  });
  size_t i = 0;
  for (; i + 2 <= size; i += 2) {
    pass_row<kPass, 0>(state, decay, update, old_key, key, query, i, sums);
    pass_row<kPass, 1>(state, decay, update, old_key, key, query, i + 1, sums);
  }
  if (i < size) pass_row<kPass, 0>(state, decay, update, old_key, key, query, i, sums);
}

// Runs a tile's tokens over `kPassColumns` columns of a state; `values` become the outputs, in rows
// `stride` apart.
template <class Decay>
inline void pass_tokens(float* state, size_t key_dim, size_t key_stride, const DeltaTile& tile,
                        size_t num_tokens, float* values, size_t stride) {
  PassSums sums;
  F32 update[kPassVectors] = {zero_f32(), zero_f32()};
  Decay decay = {};
  for (size_t t = 0; t < num_tokens; ++t) {
    const size_t row_place = t * key_stride;
    const float* key = (Decay::kIsOne ? tile.keys : tile.decayed_keys) + row_place;
    const float* query = (Decay::kIsOne ? tile.queries : tile.decayed_queries) + row_place;
    if (t == 0)
      pass_rows<Pass::kRead>(state, key_dim, decay, update, nullptr, key, query, sums);
    else
      pass_rows<Pass::kUpdateAndRead>(state, key_dim, decay, update,
                                      tile.keys + row_place - key_stride, key, query, sums);
    decay = Decay::of(tile, t, key_stride);
    const F32 beta = set_f32(tile.beta[t]), product = set_f32(tile.product[t]);
    float* row = values + t * stride;
    unroll<kPassVectors>([&](auto index) TANDEM_INLINE {
      constexpr int v = decltype(index)::value;
      const F32 seen = sums.key[0][v] + sums.key[1][v];
      const F32 read = sums.query[0][v] + sums.query[1][v];
      const F32 value = load_f32(row + v * kLanes);
      if constexpr (Decay::kIsOne) {
        update[v] = beta * fma(zero_f32() - decay.share, seen, value);
        store_f32(row + v * kLanes, fma(product, update[v], decay.share * read));
      } else {
        update[v] = beta * (value - seen);
        store_f32(row + v * kLanes, fma(product, update[v], read));
      }
    });
  }
  pass_rows<Pass::kUpdate>(state, key_dim, decay, update,
                           tile.keys + (num_tokens - 1) * key_stride, nullptr, nullptr, sums);
}

// Runs a tile's tokens over the whole state of a value head.
inline void pass_head(const GatedDeltaShape& shape, float* state, const DeltaTile& tile,
                      size_t num_tokens) {
  const size_t key_stride = key_stride_of(shape), value_stride = value_stride_of(shape);
  const auto pass = decays_by_item(shape) ? pass_tokens<ItemDecays> : pass_tokens<HeadDecay>;
  for (size_t column = 0; column < value_stride; column += kPassColumns) {
    float* panel = state + column / kStatePanel * shape.key_dim * kStatePanel;
    pass(panel + column % kStatePanel, shape.key_dim, key_stride, tile, num_tokens,
         tile.values + column, value_stride);
  }
}

// Norms the outputs of a head, and multiplies them with the gate.
template <class T>
inline void norm_and_gate(const GatedDeltaTask& task, const float* values, const T* z, T* out) {
  const size_t size = task.shape.value_dim;
  const float* weight = task.weights.norm;
  const F32 factor = set_f32(inverse_rms(values, size, task.weights.norm_eps));
  const bool is_silu = task.weights.is_silu_gated;
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F32 gates = load_wide(z + i);
    const F32 normed = load_f32(values + i) * factor * load_f32(weight + i);
    store_narrow(out + i, normed * (is_silu ? silu(gates) : sigmoid(gates)));
  }
  if (i == size) return;
  float gates[kLanes], scales[kLanes], tail[kLanes];
  load_tail(gates, z + i, size - i, kLanes);
  load_tail(scales, weight + i, size - i, kLanes);
  load_tail(tail, values + i, size - i, kLanes);
  const F32 open = load_f32(gates);
  const F32 normed = load_f32(tail) * factor * load_f32(scales);
  store_f32(tail, normed * (is_silu ? silu(open) : sigmoid(open)));
  for (size_t j = 0; i + j < size; ++j) narrow_one(out + i + j, tail[j]);
}

template <class T>
void run_item(const GatedDeltaTask& task, const GatedDeltaItem& item, float* scratch) {
  const GatedDeltaShape& shape = task.shape;
  const size_t begin = static_cast<size_t>(task.query_start[item.sequence]);
  const size_t count = static_cast<size_t>(task.query_start[item.sequence + 1]) - begin;
  const size_t slot = static_cast<size_t>(task.slots[item.sequence]);
  const Convolution<T> conv = {
      task.weights.conv,
      nullptr,
      shape.conv_width,
      num_channels_of(shape),
      static_cast<const T*>(task.x) + begin * task.x_stride,
      task.x_stride,
      static_cast<const T*>(task.carried) + slot * task.carried_stride};
  const size_t key_stride = key_stride_of(shape), value_stride = value_stride_of(shape);
  const size_t all_keys = shape.num_k_heads * shape.key_dim;
  const size_t head_state = num_panels_of(shape) * shape.key_dim * kStatePanel;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.key_dim));
  DeltaTile tile = split_scratch(shape, scratch);
  for (size_t first = 0; first < count; first += kDeltaTokens) {
    const size_t num_tokens = count - first < kDeltaTokens ? count - first : kDeltaTokens;
    const size_t head_first = item.k_head * shape.key_dim;
    convolve(conv, first, num_tokens, head_first, shape.key_dim, tile.queries, key_stride);
    convolve(conv, first, num_tokens, all_keys + head_first, shape.key_dim, tile.keys, key_stride);
    for (size_t t = 0; t < num_tokens; ++t) {
      float* query = tile.queries + t * key_stride;
      float* key = tile.keys + t * key_stride;
      scale_to_length(query, key_stride, scale);
      scale_to_length(key, key_stride, 1.0f);
      tile.product[t] = dot_block(query, key, key_stride);
    }
    for (size_t head = item.v_begin; head < item.v_end; ++head) {
      if (task.gate_type == FloatType::kFloat32)
        prepare_gates<float>(task, begin + first, num_tokens, head, tile);
      else
        prepare_gates<uint16_t>(task, begin + first, num_tokens, head, tile);
      convolve(conv, first, num_tokens, 2 * all_keys + head * shape.value_dim, shape.value_dim,
               tile.values, value_stride);
      float* state = task.states + slot * task.state_stride + head * head_state;
      pass_head(shape, state, tile, num_tokens);
      for (size_t t = 0; t < num_tokens; ++t) {
        const size_t row = begin + first + t;
        norm_and_gate(task, tile.values + t * value_stride,
                      static_cast<const T*>(task.z) + row * task.z_stride + head * shape.value_dim,
                      static_cast<T*>(task.out) + row * task.out_stride + head * shape.value_dim);
      }
    }
  }
}

void gated_delta(const GatedDeltaTask& task, const GatedDeltaItem& item, float* scratch) {
  if (task.type == FloatType::kFloat32) return run_item<float>(task, item, scratch);
  run_item<uint16_t>(task, item, scratch);
}

#include "kernels/recurrent/delta_scan-inl.h"

}  // namespace

extern const RecurrentKernels TANDEM_RECURRENT_KERNELS;
const RecurrentKernels TANDEM_RECURRENT_KERNELS = {gated_delta, scan_head,
                                                      scan_gradients};

}  // namespace tandem
