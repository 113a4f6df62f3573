// The passes over logits, compiled once per ISA; see sampling.h for what they do.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/sampling/sampling.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/vectors/vec_float-inl.h"

constexpr size_t kBlock = kSampleBlock;

// Loads the last, incomplete block of logits, filled up with -inf, which has weight 0.
inline void load_rest(float* rest, const float* logits, size_t count) {
  for (size_t i = 0; i < kBlock; ++i) rest[i] = i < count ? logits[i] : -kInfinity;
}

TANDEM_INLINE inline float scan_block(const float* logits, I32& unordered) {
  F32 v[kBlockVectors];
  for (size_t i = 0; i < kBlockVectors; ++i) {
    v[i] = load_f32(logits + i * kLanes);
    unordered |= (I32)(v[i] != v[i]);
  }
  return max_block(v);
}

RowScan scan(const float* logits, size_t size, float* block_tops) {
  I32 unordered = set_i32(0);
  float top = -kInfinity;
  size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    const float block_top = scan_block(logits + i, unordered);
    block_tops[i / kBlock] = block_top;
    top = block_top > top ? block_top : top;
  }
  if (i < size) {
    float rest[kBlock];
    load_rest(rest, logits + i, size - i);
    const float block_top = scan_block(rest, unordered);
    block_tops[i / kBlock] = block_top;
    top = block_top > top ? block_top : top;
  }
  bool has_nan = false;
  for (size_t lane = 0; lane < kLanes; ++lane) has_nan |= unordered[lane] != 0;
  return {top, has_nan};
}

TANDEM_INLINE inline F32 weigh_vector(const float* logits, F32 top, F32 inverse) {
  return exp_nonpositive((load_f32(logits) - top) * inverse);
}

void weigh(const float* logits, size_t size, float top, float inverse_temperature,
           float* weights) {
  const F32 tops = set_f32(top), inverse = set_f32(inverse_temperature);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store_f32(weights + i, weigh_vector(logits + i, tops, inverse));
  if (i == size) return;
  float rest[kBlock];
  load_rest(rest, logits + i, size - i);
  store_f32(rest, weigh_vector(rest, tops, inverse));
  for (size_t j = 0; i + j < size; ++j) weights[i + j] = rest[j];
}

TANDEM_INLINE inline float sum_weights(const float* logits, F32 top, F32 inverse) {
  F32 v[kBlockVectors];
  for (size_t i = 0; i < kBlockVectors; ++i) v[i] = weigh_vector(logits + i * kLanes, top, inverse);
  return sum_block(v);
}

double sum(const float* logits, size_t size, float top, float inverse_temperature,
           double* cumulated) {
  const F32 tops = set_f32(top), inverse = set_f32(inverse_temperature);
  double total = 0.0;
  size_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    total += static_cast<double>(sum_weights(logits + i, tops, inverse));
    cumulated[i / kBlock] = total;
  }
  if (i < size) {
    float rest[kBlock];
    load_rest(rest, logits + i, size - i);
    total += static_cast<double>(sum_weights(rest, tops, inverse));
    cumulated[i / kBlock] = total;
  }
  return total;
}

}  // namespace

extern const SampleKernels TANDEM_SAMPLE_KERNELS;
const SampleKernels TANDEM_SAMPLE_KERNELS = {scan, weigh, sum};

}  // namespace tandem
