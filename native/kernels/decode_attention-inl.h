// The body of the decode attention kernel, compiled once per ISA: TANDEM_DECODE_ATTENTION names it
// and TANDEM_LANES is how many floats a register holds. Wider vectors than the machine has would
// be kept in memory by GCC 12 (four times slower).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/decode_attention.h"

namespace tandem {
namespace {

constexpr size_t kWidth = TANDEM_LANES;
typedef float Floats __attribute__((vector_size(4 * TANDEM_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * TANDEM_LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * TANDEM_LANES)));

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// bfloat16 is the upper half of a float.
inline Floats load(const uint16_t* p) {
  Shorts s;
  std::memcpy(&s, p, sizeof s);
  const Ints bits = __builtin_convertvector(s, Ints) << 16;
  return (Floats)bits;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline float load_one(const float* p) { return *p; }
inline float load_one(const uint16_t* p) {
  const uint32_t bits = static_cast<uint32_t>(*p) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store_one(float* p, float value) { *p = value; }
inline void store_one(uint16_t* p, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Round to nearest even; a NaN stays one.
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits = is_nan ? (bits | 0x400000u) : bits + 0x7fffu + ((bits >> 16) & 1u);
  *p = static_cast<uint16_t>(bits >> 16);
}

// Halves added to halves: the order depends on the width alone.
inline float sum(Floats v) {
  float lanes[kWidth];
  std::memcpy(lanes, &v, sizeof lanes);
  for (size_t half = kWidth / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// exp(x) for x <= 0, relative error below 2e-7: 2^n * p(f), p the Taylor polynomial of 2^f on
// [-1/2, 1/2]. Below -87 the result would be denormal and is 0. NaN stays NaN.
inline Floats exp_nonpositive(Floats x) {
  const Floats y = x * 1.44269504088896f;
  const Floats zero = Floats{};
  const Floats clamped = y > -126.0f ? y : zero - 126.0f;
  const Ints n = __builtin_convertvector(clamped - 0.5f, Ints);  // Truncation rounds: y <= 0.
  const Floats f = clamped - __builtin_convertvector(n, Floats);
  Floats p = zero + 1.54035304e-4f;
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  const Ints power = (n + 127) << 23;
  const Floats result = p * (Floats)power;
  return x != x ? x : (x > -87.0f ? result : zero);
}

// Scratch of a thread, kept between calls.
struct Scratch {
  std::vector<float> queries, scores, sums;
};

template <class Kv>
inline float dot(const float* q, const Kv* k, size_t head_dim) {
  Floats lanes = Floats{};
  size_t i = 0;
  for (; i + kWidth <= head_dim; i += kWidth) lanes = lanes + load(q + i) * load(k + i);
  float total = sum(lanes);
  for (; i < head_dim; ++i) total += q[i] * load_one(k + i);
  return total;
}

template <class Kv>
inline void add_scaled(float* sums, float weight, const Kv* v, size_t head_dim) {
  size_t i = 0;
  for (; i + kWidth <= head_dim; i += kWidth)
    store(sums + i, load(sums + i) + load(v + i) * weight);
  for (; i < head_dim; ++i) sums[i] += load_one(v + i) * weight;
}

// Turns scores into exponentials of their distance to the largest; returns their sum. The tail of
// the padded row is 0. A NaN among them makes all of the result NaN, as it should.
inline float exponentiate(float* scores, size_t count, size_t padded) {
  float largest = scores[0];
  for (size_t t = 1; t < count; ++t) largest = scores[t] > largest ? scores[t] : largest;
  for (size_t t = count; t < padded; ++t) scores[t] = largest - 1e30f;
  Floats total = Floats{};
  for (size_t t = 0; t < padded; t += kWidth) {
    const Floats weights = exp_nonpositive(load(scores + t) - largest);
    store(scores + t, weights);
    total = total + weights;
  }
  return sum(total);
}

template <class Q, class Kv>
void run_task(const DecodeStep& step, const DecodeQueries& queries, size_t task, Scratch& scratch) {
  const size_t sequence = task / step.num_kv_heads, kv_head = task % step.num_kv_heads;
  const size_t dim = step.head_dim, group = queries.num_heads / step.num_kv_heads;
  const size_t context = static_cast<size_t>(step.context_lens[sequence]);
  const size_t padded = (context + kWidth - 1) / kWidth * kWidth;
  scratch.queries.resize(group * dim);
  scratch.scores.resize(group * padded);
  scratch.sums.assign(group * dim, 0.0f);
  const Q* q = static_cast<const Q*>(queries.q) + sequence * queries.q_stride + kv_head * group * dim;
  for (size_t i = 0; i < group * dim; ++i) scratch.queries[i] = load_one(q + i) * queries.scale;
  const size_t head_items = step.block_size * dim;
  const size_t layer_items = 2 * step.num_kv_heads * head_items;
  const int64_t* table = step.block_table + sequence * step.table_width;
  const Kv* layer = static_cast<const Kv*>(step.kv) + queries.layer_idx * layer_items;
  const auto block_of = [&](size_t token, size_t kind) {
    const size_t block_id = static_cast<size_t>(table[token / step.block_size]);
    return layer + block_id * step.num_layers * layer_items +
           (kind * step.num_kv_heads + kv_head) * head_items;
  };
  for (size_t first = 0; first < context; first += step.block_size) {
    const Kv* keys = block_of(first, 0);
    const size_t count = context - first < step.block_size ? context - first : step.block_size;
    for (size_t t = 0; t < count; ++t)
      for (size_t g = 0; g < group; ++g)
        scratch.scores[g * padded + first + t] =
            dot(scratch.queries.data() + g * dim, keys + t * dim, dim);
  }
  Q* out = static_cast<Q*>(queries.out) + (sequence * queries.num_heads + kv_head * group) * dim;
  std::vector<float>& sums = scratch.sums;
  float totals[64];
  for (size_t g = 0; g < group; ++g)
    totals[g] = exponentiate(scratch.scores.data() + g * padded, context, padded);
  for (size_t first = 0; first < context; first += step.block_size) {
    const Kv* values = block_of(first, 1);
    const size_t count = context - first < step.block_size ? context - first : step.block_size;
    for (size_t t = 0; t < count; ++t)
      for (size_t g = 0; g < group; ++g)
        add_scaled(sums.data() + g * dim, scratch.scores[g * padded + first + t], values + t * dim,
                   dim);
  }
  for (size_t g = 0; g < group; ++g)
    for (size_t i = 0; i < dim; ++i) store_one(out + g * dim + i, sums[g * dim + i] / totals[g]);
}

template <class Q, class Kv>
void run_tasks(const DecodeStep& step, const DecodeQueries& queries, size_t begin, size_t end) {
  thread_local Scratch scratch;
  for (size_t task = begin; task < end; ++task) run_task<Q, Kv>(step, queries, task, scratch);
}

}  // namespace

void TANDEM_DECODE_ATTENTION(const DecodeStep& step, const DecodeQueries& queries, size_t begin,
                             size_t end) {
  const bool q_is_float = queries.type == FloatType::kFloat32;
  const bool kv_is_float = step.kv_type == FloatType::kFloat32;
  if (q_is_float && kv_is_float) return run_tasks<float, float>(step, queries, begin, end);
  if (q_is_float) return run_tasks<float, uint16_t>(step, queries, begin, end);
  if (kv_is_float) return run_tasks<uint16_t, float>(step, queries, begin, end);
  return run_tasks<uint16_t, uint16_t>(step, queries, begin, end);
}

}  // namespace tandem
