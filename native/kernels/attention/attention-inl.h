// The body of the attention kernel, compiled once per ISA; see attention.h for what it does.
//
// Scores and mixes are products of rows by a packed tile, with lanes along keys and along value
// columns; each result has one chain of operations, ascending, whatever stands beside it. Float
// operands agree bitwise across ISAs, and so do bf16 ones except where the machine multiplies
// them itself (TANDEM_BF16), which rounds differently.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/attention/attention_kernels.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/vectors/vec_float-inl.h"

constexpr size_t kTile = kTileTokens;
inline size_t min_of(size_t a, size_t b) { return a < b ? a : b; }
inline size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// Prefetch of the next tile's cache lines while this tile is computed. A few lines are fetched
// between all steps of the work: the core stalls if many are requested at once, and memory is idle
// if none are.
class Ahead {
 public:
  void clear() {
    run_ = num_runs_ = 0;
    next_ = end_ = nullptr;
  }
  // Adds the cache lines of `size_bytes` from `begin` on to those to fetch.
  void add(const uint8_t* begin, size_t size_bytes) {
    runs_[num_runs_++] = {begin, begin + size_bytes};
  }
  template <size_t kLines>
  TANDEM_INLINE void fetch_some() {
    for (size_t i = 0; i < kLines; ++i) fetch();
  }
  void fetch_rest() {
    while (next_ < end_ || run_ < num_runs_) fetch();
  }

 private:
  static constexpr size_t kLine = 64;
  struct Run {
    const uint8_t* begin;
    const uint8_t* end;
  };

  TANDEM_INLINE void fetch() {
    if (next_ >= end_) {
      if (run_ == num_runs_) return;
      next_ = runs_[run_].begin;
      end_ = runs_[run_].end;
      ++run_;
    }
    __builtin_prefetch(next_, 0, 3);
    next_ += kLine;
  }

  const uint8_t* next_ = nullptr;
  const uint8_t* end_ = nullptr;
  size_t run_ = 0, num_runs_ = 0;
  Run runs_[2 * kTile];
};
// Numbers of cache lines to fetch beside one step of a tile's work. With eight rows of 128 items in
// bf16 they add up to a whole tile; fewer rows have fewer steps, which take less time.
constexpr size_t kLinesOfSquare = 4;
constexpr size_t lines_beside_scores(size_t rows) { return rows > 4 ? 1 : 2; }
constexpr size_t kLinesBesideWeights = 2;
constexpr size_t kLinesBesideValues = 1;
constexpr size_t lines_beside_mix(size_t rows) { return rows > 4 ? 2 : 4; }

// Largest number of rows that fit one block of registers, so that each key and value is loaded once
// for all rows.
constexpr size_t kFewRows = kLanes == 16 ? 8 : kMaxRows;
constexpr int vectors_beside_few(size_t rows) { return kLanes == 16 && rows <= 4 ? 4 : 2; }

// The operand of one step along K (the summed dimension): one float in each lane, or a pair of
// bf16.
struct FloatOperand {
  typedef F32 Columns;
  static constexpr size_t kItems = 1;
  static Columns columns(I32 v) { return as_f32(v); }
  static F32 multiply(F32 sum, Columns columns, const uint8_t* row) {
    float x;
    __builtin_memcpy(&x, row, 4);
    return fma(columns, set_f32(x), sum);
  }
};
struct Bf16Operand {
  typedef Bf16Pair Columns;
  static constexpr size_t kItems = 2;
  static Columns columns(I32 v) { return bf16_weights(v); }
  static F32 multiply(F32 sum, Columns columns, const uint8_t* row) {
    return dot(sum, columns, bf16_row(row));
  }
};

// Computes out[rows][kVectors of columns] = start * factor + a b, where `start` is what `out`
// holds. Both operands have 4 bytes per step along the summed dimension, in `b` `b_stride` bytes
// apart.
template <class Op, int kRows, int kVectors, bool kStartsFromZero>
TANDEM_INLINE inline void multiply_block(const uint8_t* a, size_t a_stride, const uint8_t* b,
                                         size_t b_stride, size_t num_steps, float* out,
                                         size_t out_stride, const float* factors, Ahead& ahead) {
  F32 sums[kRows][kVectors];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      if constexpr (kStartsFromZero)
        sums[r.value][v.value] = zero_f32();
      else
        sums[r.value][v.value] =
            load_f32(out + r.value * out_stride + v.value * kLanes) * set_f32(factors[r.value]);
    });
  });
  for (size_t step = 0; step < num_steps; ++step) {
    ahead.fetch_some<lines_beside_scores(kRows)>();
    typename Op::Columns columns[kVectors];
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      columns[v.value] = Op::columns(load_i32(b + step * b_stride + v.value * kLanes * 4));
    });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sums[r.value][v.value] = Op::multiply(sums[r.value][v.value], columns[v.value],
                                              a + r.value * a_stride + step * 4);
      });
    });
  }
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      store_f32(out + r.value * out_stride + v.value * kLanes, sums[r.value][v.value]);
    });
  });
}

struct Product {
  const uint8_t* a;
  size_t a_stride;  // Bytes.
  const uint8_t* b;
  size_t b_stride;  // Bytes.
  size_t num_steps;
  float* out;
  size_t out_stride;  // Items.
  const float* factors;
  Ahead* ahead;
};

template <class Op, int kRows, int kVectors, bool kStartsFromZero>
void multiply_rows(const Product& p, size_t row, size_t column) {
  multiply_block<Op, kRows, kVectors, kStartsFromZero>(
      p.a + row * p.a_stride, p.a_stride, p.b + column * 4, p.b_stride, p.num_steps,
      p.out + row * p.out_stride + column, p.out_stride,
      kStartsFromZero ? nullptr : p.factors + row, *p.ahead);
}

template <class Op, int kVectors, bool kStartsFromZero>
inline void multiply_columns(const Product& p, size_t num_rows, size_t column) {
  size_t row = 0;
  for (; row + kMaxRows <= num_rows; row += kMaxRows)
    multiply_rows<Op, kMaxRows, kVectors, kStartsFromZero>(p, row, column);
  switch (num_rows - row) {
    case 1:
      return multiply_rows<Op, 1, kVectors, kStartsFromZero>(p, row, column);
    case 2:
      if constexpr (kMaxRows > 2)
        return multiply_rows<Op, 2, kVectors, kStartsFromZero>(p, row, column);
      break;
    case 3:
      if constexpr (kMaxRows > 3)
        return multiply_rows<Op, 3, kVectors, kStartsFromZero>(p, row, column);
      break;
    case 4:
      if constexpr (kMaxRows > 4)
        return multiply_rows<Op, 4, kVectors, kStartsFromZero>(p, row, column);
      break;
    case 5:
      if constexpr (kMaxRows > 5)
        return multiply_rows<Op, 5, kVectors, kStartsFromZero>(p, row, column);
      break;
    default:
      break;
  }
}

// Calls `body` with the number of rows, 1 to kFewRows, as a constant.
template <size_t kRows = kFewRows, class Body>
TANDEM_INLINE inline void with_few_rows(size_t num_rows, const Body& body) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return with_few_rows<kRows - 1>(num_rows, body);
  }
  body(Index<kRows>{});
}

// Multiplies all rows with all columns, a multiple of kLanes.
template <class Op, bool kStartsFromZero>
inline void multiply(const Product& p, size_t num_rows, size_t num_columns) {
  // Products that start from zero are scores; these have kTile columns, a multiple of the columns
  // that a register block of few rows has.
  if constexpr (kStartsFromZero && kFewRows > kMaxRows) {
    if (num_rows > kMaxRows && num_rows <= kFewRows)
      return with_few_rows(num_rows, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value, kVectors = vectors_beside_few(kRows);
        for (size_t column = 0; column < num_columns; column += kVectors * kLanes)
          multiply_rows<Op, kRows, kVectors, true>(p, 0, column);
      });
  }
  constexpr int kVectors = vectors_beside(kMaxRows);
  size_t column = 0;
  for (; column + kVectors * kLanes <= num_columns; column += kVectors * kLanes)
    multiply_columns<Op, kVectors, kStartsFromZero>(p, num_rows, column);
  for (; column < num_columns; column += kLanes)
    multiply_columns<Op, 1, kStartsFromZero>(p, num_rows, column);
}

// Items of the KV pool, loaded as floats; codes are not multiplied with their scales here.
struct Fp8 {
  uint8_t code;
};
TANDEM_INLINE inline F32 load_items(const float* p) { return load_f32(p); }
TANDEM_INLINE inline F32 load_items(const uint16_t* p) { return load_wide(p); }
TANDEM_INLINE inline F32 decode_int8(I32 code) { return to_f32(code); }
// Widens e4m3 by moving its exponent to float's. A code below 2^-6 (subnormal) has no leading one,
// so the one that moving supplies is subtracted and the rest doubled. No intermediate is denormal:
// a product of denormals takes a hundred times as long.
TANDEM_INLINE inline F32 decode_fp8(I32 code) {
  const I32 magnitude = code & 0x7f;
  const F32 normal = as_f32((magnitude << 20) + 0x3c000000);
  const F32 left = normal - 0x1p-7f;
  const I32 bits = as_i32(magnitude < 8 ? left + left : normal) | ((code & 0x80) << 24);
  return as_f32(magnitude == 0x7f ? bits | 0x7fc00000 : bits);
}
TANDEM_INLINE inline F32 load_items(const int8_t* p) {
  return decode_int8((load_bytes_wide(p) << 24) >> 24);
}
TANDEM_INLINE inline F32 load_items(const Fp8* p) {
  return decode_fp8(load_bytes_wide(p));
}

// Loads `count` items from `p`, filled up with zeros.
template <class T>
TANDEM_INLINE inline F32 load_some(const T* p, size_t count) {
  if (count >= kLanes) return load_items(p);
  T items[kLanes];
  __builtin_memset(items, 0, sizeof items);
  __builtin_memcpy(items, p, count * sizeof(T));
  return load_items(items);
}
TANDEM_INLINE inline I32 load_bytes(const uint8_t* p, size_t count) {
  if (count >= kLanes * 4) return load_i32(p);
  uint8_t bytes[kLanes * 4];
  __builtin_memset(bytes, 0, sizeof bytes);
  __builtin_memcpy(bytes, p, count);
  return load_i32(bytes);
}

// Packs two vectors of floats, which bf16 represents exactly, into pairs of bf16: an item of `even`
// beside an item of `odd`.
TANDEM_INLINE inline I32 pair_bf16(F32 even, F32 odd) {
  return ((as_i32(even) >> 16) & 0xffff) | (as_i32(odd) & static_cast<int32_t>(0xffff0000));
}
// Loads pairs of consecutive codes as pairs of bf16.
TANDEM_INLINE inline I32 load_pairs(const int8_t* p) {
  const I32 codes = load_shorts(reinterpret_cast<const uint16_t*>(p));
  return pair_bf16(decode_int8((codes << 24) >> 24), decode_int8((codes << 16) >> 24));
}
TANDEM_INLINE inline I32 load_pairs(const Fp8* p) {
  const I32 codes = load_shorts(reinterpret_cast<const uint16_t*>(p));
  return pair_bf16(decode_fp8(codes & 0xff), decode_fp8(codes >> 8));
}

// Loads kLanes steps of a key along the summed dimension: floats, or pairs of bf16.
template <class Op, class T>
TANDEM_INLINE inline I32 load_key_steps(const uint8_t* row, size_t step, size_t key_dim) {
  const T* items = reinterpret_cast<const T*>(row) + step * Op::kItems;
  const size_t left = key_dim - step * Op::kItems;
  if constexpr (Op::kItems == 1) {
    return as_i32(load_some(items, left));
  } else if constexpr (sizeof(T) == 2) {
    return load_bytes(reinterpret_cast<const uint8_t*>(items), left * 2);
  } else {
    static_assert(sizeof(T) == 1, "float keys have float operands");
    if (left >= 2 * kLanes) return load_pairs(items);
    T some[2 * kLanes];
    __builtin_memset(some, 0, sizeof some);
    __builtin_memcpy(some, items, left);
    return load_pairs(some);
  }
}

// Packs keys as [steps][kTile keys], 4 bytes each, where a step is a float or a pair of bf16;
// missing keys are zeros.
template <class Op, class T>
void pack_keys(uint8_t* out, const uint8_t* const* rows, size_t num_rows, size_t key_dim,
               Ahead& ahead) {
  const size_t num_steps = (key_dim + Op::kItems - 1) / Op::kItems;
  // Number of steps in which every row has enough items to fill a whole register.
  const size_t full_steps = key_dim / (Op::kItems * kLanes) * kLanes;
  constexpr size_t kAnySize = ~size_t{0};
  for (size_t first = 0; first < kTile; first += kLanes) {
    for (size_t step = 0; step < num_steps; step += kLanes) {
      I32 square[kLanes];
      if (first + kLanes <= num_rows && step < full_steps) {
        unroll<kLanes>([&](auto i) TANDEM_INLINE {
          square[i.value] = load_key_steps<Op, T>(rows[first + i.value], step, kAnySize);
        });
      } else {
        for (size_t i = 0; i < kLanes; ++i)
          square[i] = first + i < num_rows ? load_key_steps<Op, T>(rows[first + i], step, key_dim)
                                           : set_i32(0);
      }
      ahead.fetch_some<kLinesOfSquare / 2>();
      transpose(square);
      ahead.fetch_some<kLinesOfSquare / 2>();
      float* line = reinterpret_cast<float*>(out + (step * kTile + first) * 4);
      if (step < full_steps) {
        unroll<kLanes>([&](auto i) TANDEM_INLINE {
          store_f32(line + i.value * kTile, as_f32(square[i.value]));
        });
      } else {
        const size_t count = min_of(kLanes, num_steps - step);
        for (size_t i = 0; i < count; ++i) store_f32(line + i * kTile, as_f32(square[i]));
      }
    }
  }
}

// Loads kLanes columns of one token's values (float operands), or of two tokens' values in pairs
// (bf16).
template <class Op, class T>
TANDEM_INLINE inline I32 join_values(const T* even, const T* odd, size_t left) {
  if constexpr (Op::kItems == 1)
    return as_i32(load_some(even, left));
  else if constexpr (sizeof(T) == 2)
    return left >= kLanes ? load_shorts(even) | (load_shorts(odd) << 16)
                          : ((as_i32(load_some(even, left)) >> 16) & 0xffff) |
                                as_i32(load_some(odd, left));
  else
    return pair_bf16(load_some(even, left), load_some(odd, left));
}

// Interleaves the items of a and b, from item kFirst of each on.
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
template <size_t kFirst, size_t... kIndex>
TANDEM_INLINE inline I32 interleave(Shorts a, Shorts b, Indices<kIndex...>) {
  return (I32)__builtin_shufflevector(a, b, (kFirst + kIndex / 2 + kIndex % 2 * 2 * kLanes)...);
}
typedef MakeIndices<2 * kLanes>::Type ShortLanes;

// Loads 2 * kLanes columns of values, in the form of join_values.
template <class Op, class T>
TANDEM_INLINE inline void join_twice(const T* even, const T* odd, I32 (&out)[2]) {
  if constexpr (Op::kItems == 2 && sizeof(T) == 2) {
    Shorts a, b;
    __builtin_memcpy(&a, even, sizeof a);
    __builtin_memcpy(&b, odd, sizeof b);
    out[0] = interleave<0>(a, b, ShortLanes{});
    out[1] = interleave<kLanes>(a, b, ShortLanes{});
  } else {
    out[0] = join_values<Op, T>(even, odd, kLanes);
    out[1] = join_values<Op, T>(even + kLanes, odd + kLanes, kLanes);
  }
}

// Packs values as [kTile / items of a step][columns], 4 bytes each, where a step is one token
// (float) or two (bf16).
template <class Op, class T>
void pack_values(uint8_t* out, const uint8_t* const* rows, size_t num_rows, size_t value_dim,
                 Ahead& ahead) {
  const size_t columns = round_up(value_dim, kColumnStep);
  for (size_t token = 0; token < kTile; token += Op::kItems) {
    float* line = reinterpret_cast<float*>(out + token / Op::kItems * columns * 4);
    size_t c = 0;
    if (token < num_rows) {
      const T* even = reinterpret_cast<const T*>(rows[token]);
      // After the last token any row serves as the second of the pair: its weights are 0, and its
      // items are finite.
      const T* odd = Op::kItems == 2 && token + 1 < num_rows
                         ? reinterpret_cast<const T*>(rows[token + 1])
                         : even;
      for (; c + 2 * kLanes <= value_dim; c += 2 * kLanes) {
        I32 joined[2];
        join_twice<Op, T>(even + c, odd + c, joined);
        store_f32(line + c, as_f32(joined[0]));
        store_f32(line + c + kLanes, as_f32(joined[1]));
      }
      for (; c < value_dim; c += kLanes)
        store_f32(line + c, as_f32(join_values<Op, T>(even + c, odd + c, value_dim - c)));
    }
    for (; c < columns; c += kLanes) store_f32(line + c, zero_f32());
    ahead.fetch_some<kLinesBesideValues>();
  }
}

// Adds weights times values for few rows, without packing the values: storing and loading again
// what is used once would cost more than the products. The chain of operations is that of
// pack_values and `multiply`; the tokens that are missing there add only zeros.
template <class Op, class T, int kRows>
void mix_few(const Product& p, const uint8_t* const* values, size_t num_tokens, size_t column) {
  constexpr int kVectors = vectors_beside_few(kRows);
  F32 sums[kRows][kVectors];
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      sums[r.value][v.value] =
          load_f32(p.out + r.value * p.out_stride + column + v.value * kLanes) *
          set_f32(p.factors[r.value]);
    });
  });
  for (size_t token = 0; token < num_tokens; token += Op::kItems) {
    p.ahead->fetch_some<lines_beside_mix(kRows)>();
    const T* even = reinterpret_cast<const T*>(values[token]) + column;
    const T* odd = Op::kItems == 2 && token + 1 < num_tokens
                       ? reinterpret_cast<const T*>(values[token + 1]) + column
                       : even;
    typename Op::Columns columns[kVectors];
    unroll<kVectors / 2>([&](auto v) TANDEM_INLINE {
      constexpr size_t kOffset = 2 * v.value * kLanes;
      I32 joined[2];
      join_twice<Op, T>(even + kOffset, odd + kOffset, joined);
      columns[2 * v.value] = Op::columns(joined[0]);
      columns[2 * v.value + 1] = Op::columns(joined[1]);
    });
    unroll<kRows>([&](auto r) TANDEM_INLINE {
      unroll<kVectors>([&](auto v) TANDEM_INLINE {
        sums[r.value][v.value] = Op::multiply(sums[r.value][v.value], columns[v.value],
                                              p.a + r.value * p.a_stride + token / Op::kItems * 4);
      });
    });
  }
  unroll<kRows>([&](auto r) TANDEM_INLINE {
    unroll<kVectors>([&](auto v) TANDEM_INLINE {
      store_f32(p.out + r.value * p.out_stride + column + v.value * kLanes,
                sums[r.value][v.value]);
    });
  });
}

template <class Op>
void load_query_rows(const QueryRows& rows, void* operand) {
  const size_t steps = (rows.key_dim + Op::kItems - 1) / Op::kItems;
  const size_t items = steps * Op::kItems;
  for (size_t i = 0; i < rows.num_rows; ++i) {
    const size_t r = rows.first_row + i;
    const size_t offset = r / rows.group * rows.token_stride + r % rows.group * rows.key_dim;
    for (size_t k = 0; k < items; k += kLanes) {
      const size_t left = rows.key_dim - min_of(k, rows.key_dim);
      F32 x = zero_f32();
      if (left > 0)
        x = rows.type == FloatType::kFloat32
                ? load_some(static_cast<const float*>(rows.q) + offset + k, left)
                : load_some(static_cast<const uint16_t*>(rows.q) + offset + k, left);
      // The last store of a row may overwrite the beginning of the next row, which is written after
      // it; the buffer has room for one more store at its end.
      if constexpr (Op::kItems == 1)
        store_f32(static_cast<float*>(operand) + i * items + k, x);
      else
        store_narrow(static_cast<uint16_t*>(operand) + i * items + k, x);
    }
  }
}

void load_queries(const QueryRows& rows, void* operand, bool is_bf16) {
  if (is_bf16) return load_query_rows<Bf16Operand>(rows, operand);
  load_query_rows<FloatOperand>(rows, operand);
}

// Addresses of the rows of a tile's keys or values, and their quantization scales.
struct TileRowsOf {
  const uint8_t* rows[kTile];
  float scales[kTile];
};

inline void find_rows(const KeyRows& keys, size_t first, size_t count, bool is_value,
                      TileRowsOf& found) {
  const KvView& kv = *keys.kv;
  const bool has_scales = kv.type == KvType::kFp8 || kv.type == KvType::kInt8;
  uint16_t halves[kTile];
  for (size_t t = 0; t < count;) {
    const size_t position =
        keys.positions == nullptr ? first + t : static_cast<size_t>(keys.positions[first + t]);
    const size_t offset = position % kv.block_size;
    const uint8_t* layer =
        kv.base + static_cast<size_t>(keys.blocks[position / kv.block_size]) * kv.block_bytes +
        keys.layer_offset;
    const uint8_t* row = layer + keys.kv_head * kv.head_bytes + offset * kv.row_bytes +
                         (is_value ? kv.value_offset : 0);
    // Keys that are chosen one by one (`positions`) are not consecutive, so each is a run of its
    // own.
    const size_t run = keys.positions == nullptr ? kv.block_size - offset : 1;
    const size_t end = min_of(count, t + run);
    if (has_scales)
      __builtin_memcpy(halves + t,
                       layer + (is_value ? kv.value_scale_offset : kv.key_scale_offset) +
                           (keys.kv_head * kv.block_size + offset) * 2,
                       (end - t) * 2);
    for (; t < end; ++t, row += kv.row_bytes) found.rows[t] = row;
  }
  if (!has_scales) return;
  for (size_t t = count; t < kTile; ++t) halves[t] = 0;
  for (size_t t = 0; t < kTile; t += kLanes) store_f32(found.scales + t, load_fp16(halves + t));
}

// Notes the cache lines of the tile that begins at token `first`, to be prefetched; `left` tokens
// remain from there on.
inline void find_ahead(const KeyRows& keys, size_t first, size_t left, Ahead& ahead) {
  const KvView& kv = *keys.kv;
  const size_t count = min_of(kTile, left);
  ahead.clear();
  // Keys first, then values; with latents (MLA) the values are part of the keys.
  for (size_t offset = 0; offset <= kv.value_offset; offset += kv.value_offset) {
    for (size_t t = 0; t < count;) {
      const size_t position =
          keys.positions == nullptr ? first + t : static_cast<size_t>(keys.positions[first + t]);
      const size_t token = position % kv.block_size;
      const size_t run =
          keys.positions == nullptr ? min_of(count - t, kv.block_size - token) : 1;
      const size_t block = static_cast<size_t>(keys.blocks[position / kv.block_size]);
      ahead.add(kv.base + block * kv.block_bytes + keys.layer_offset +
                    keys.kv_head * kv.head_bytes + offset + token * kv.row_bytes,
                run * kv.row_bytes);
      t += run;
    }
    if (kv.value_offset == 0) break;
  }
}

// Calls `body` with a value of the C++ type of the pool's items.
template <class Op, class Body>
TANDEM_INLINE inline void with_item(KvType type, const Body& body) {
  switch (type) {
    case KvType::kFloat32:
      // Float keys are never multiplied as bf16.
      if constexpr (Op::kItems == 1) body(float{});
      return;
    case KvType::kBfloat16:
      return body(uint16_t{});
    case KvType::kFp8:
      return body(Fp8{});
    case KvType::kInt8:
      return body(int8_t{});
  }
}

template <class Op>
void pack_tile(const KvView& kv, const TileRowsOf& found, size_t count, bool is_value, void* out,
               Ahead& ahead) {
  uint8_t* packed = static_cast<uint8_t*>(out);
  const size_t size = is_value ? kv.value_dim : kv.key_dim;
  with_item<Op>(kv.type, [&](auto item) {
    typedef decltype(item) T;
    if (is_value)
      pack_values<Op, T>(packed, found.rows, count, size, ahead);
    else
      pack_keys<Op, T>(packed, found.rows, count, size, ahead);
  });
}

// True if mix_tile can add the values without packing them: few rows, and values that fill whole
// registers.
inline bool is_mixed_unpacked(size_t num_rows, size_t value_dim) {
  return num_rows <= kFewRows && value_dim % (4 * kLanes) == 0;
}
// Adds weights times values to the sums of a tile's rows.
template <class Op>
void mix_tile(const KvView& kv, const TileRowsOf& found, size_t count, const Product& product,
              size_t num_rows) {
  with_item<Op>(kv.type, [&](auto item) {
    typedef decltype(item) T;
    with_few_rows(num_rows, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      constexpr size_t kColumns = vectors_beside_few(kRows) * kLanes;
      for (size_t column = 0; column < kv.value_dim; column += kColumns)
        mix_few<Op, T, kRows>(product, found.rows, count, column);
    });
  });
}

// Keys of a tile, [first, last), that a row (query) sees.
struct Visible {
  size_t first, last;
};
inline Visible find_visible(const SplitTask& task, size_t row, size_t tile) {
  const int64_t position =
      task.first_position + static_cast<int64_t>((task.first_row + row) / task.group);
  const int64_t start = static_cast<int64_t>(tile);
  const int64_t last = position - start + 1;
  const int64_t first = task.rule.first_seen(position) - start;
  const int64_t size = static_cast<int64_t>(kTile);
  return {static_cast<size_t>(first < 0 ? 0 : (first > size ? size : first)),
          static_cast<size_t>(last < 0 ? 0 : (last > size ? size : last))};
}

struct TileWork {
  size_t begin_row, end_row;  // Those that see a key of the tile.
  bool is_masked;             // Some of them do not see all.
  const float* key_scales;    // Null is none.
  const float* value_scales;
};

// Scales, caps and masks a row of scores in place; returns the largest score.
inline float shape_scores(const AttentionRule& rule, const float* key_scales, Visible visible,
                          float* scores) {
  F32 v[kBlockVectors];
  const F32 scale = set_f32(rule.scale);
  for (size_t i = 0; i < kBlockVectors; ++i) {
    F32 score = load_f32(scores + i * kLanes);
    if (key_scales != nullptr) score = score * load_f32(key_scales + i * kLanes);
    v[i] = score * scale;
  }
  if (rule.soft_cap > 0.0f) {
    const F32 cap = set_f32(rule.soft_cap);
    for (size_t i = 0; i < kBlockVectors; ++i) v[i] = tanh_of(v[i] / cap) * cap;
  }
  if (visible.first > 0 || visible.last < kTile) {
    I32 lane;
    for (size_t i = 0; i < kLanes; ++i) lane[i] = static_cast<int32_t>(i);
    const I32 first = set_i32(static_cast<int32_t>(visible.first));
    const I32 last = set_i32(static_cast<int32_t>(visible.last));
    for (size_t i = 0; i < kBlockVectors; ++i) {
      const I32 key = lane + static_cast<int32_t>(i * kLanes);
      v[i] = (key >= first) & (key < last) ? v[i] : set_f32(-kInfinity);
    }
  }
  for (size_t i = 0; i < kBlockVectors; ++i) store_f32(scores + i * kLanes, v[i]);
  return max_block(v);
}

template <class Op>
inline void store_weights(void* weights, size_t row, size_t i, F32 v) {
  if constexpr (Op::kItems == 1)
    store_f32(static_cast<float*>(weights) + row * kTile + i, v);
  else
    store_narrow(static_cast<uint16_t*>(weights) + row * kTile + i, v);
}

// Turns a tile's scores into weights (exponentials), and computes the factors by which the rows'
// earlier sums are scaled to the new largest score.
template <class Op>
void weigh_tile(const SplitTask& task, const TileWork& work, size_t tile, Ahead& ahead) {
  const RowState& state = task.state;
  float* factors = task.scratch.factors;
  float references[kTileRows + 16];
  for (size_t r = work.begin_row; r < work.end_row; ++r) {
    float* scores = task.scratch.scores + r * kTile;
    const Visible visible = work.is_masked ? find_visible(task, r, tile) : Visible{0, kTile};
    const float found = shape_scores(task.rule, work.key_scales, visible, scores);
    const float old = state.largest[r];
    const float largest = found > old ? found : old;
    // If all scores are -inf, subtract 0 instead: exp(-inf - -inf) would be NaN, and the weights
    // must be 0.
    references[r] = largest == -kInfinity ? 0.0f : largest;
    factors[r] = old - references[r];
    state.largest[r] = largest;
  }
  for (size_t r = work.begin_row; r < work.end_row; r += kLanes)
    store_f32(factors + r, exp_nonpositive(load_f32(factors + r)));
  for (size_t r = work.begin_row; r < work.end_row; ++r) {
    const float* scores = task.scratch.scores + r * kTile;
    const F32 reference = set_f32(references[r]);
    F32 v[kBlockVectors];
    for (size_t i = 0; i < kBlockVectors; ++i) {
      ahead.fetch_some<kLinesBesideWeights>();
      v[i] = exp_nonpositive(load_f32(scores + i * kLanes) - reference);
      const F32 scaled = work.value_scales == nullptr
                             ? v[i]
                             : v[i] * load_f32(work.value_scales + i * kLanes);
      store_weights<Op>(task.scratch.weights, r, i * kLanes, scaled);
    }
    state.total[r] = state.total[r] * factors[r] + sum_block(v);
  }
}

template <class Op>
void attend_rows(const SplitTask& task) {
  const KvView& kv = *task.rows.kv;
  const size_t columns = round_up(kv.value_dim, kColumnStep);
  const size_t steps = (kv.key_dim + Op::kItems - 1) / Op::kItems;
  for (size_t r = 0; r < task.num_rows; ++r) {
    task.state.largest[r] = -kInfinity;
    task.state.total[r] = 0.0f;
    for (size_t c = 0; c < columns; c += kLanes)
      store_f32(task.state.sums + r * columns + c, zero_f32());
  }
  const int64_t last_position =
      task.first_position +
      static_cast<int64_t>((task.first_row + task.num_rows - 1) / task.group);
  const size_t context = static_cast<size_t>(last_position) + 1;
  const bool has_scales = kv.type == KvType::kFp8 || kv.type == KvType::kInt8;
  TileRowsOf keys, values;
  Ahead ahead;
  // Fetch the first tile here: no tile before it has prefetched it, and its values would be read
  // one line at a time.
  if (task.key_begin < context) {
    find_ahead(task.rows, task.key_begin, context - task.key_begin, ahead);
    ahead.fetch_rest();
  }
  for (size_t tile = task.key_begin; tile < task.key_end && tile < context; tile += kTile) {
    TileWork work = {0, task.num_rows, false, nullptr, nullptr};
    // Skip rows that see no key of the tile. Rows ascend in position: the first ones are before the
    // tile, and with a window the last ones are past it.
    while (work.begin_row < work.end_row &&
           find_visible(task, work.begin_row, tile).last == 0)
      ++work.begin_row;
    while (work.begin_row < work.end_row &&
           find_visible(task, work.end_row - 1, tile).first >= kTile)
      --work.end_row;
    const size_t num_rows = work.end_row - work.begin_row;
    if (num_rows == 0) continue;
    work.is_masked = find_visible(task, work.begin_row, tile).last < kTile ||
                     find_visible(task, work.end_row - 1, tile).first > 0;
    const size_t count = min_of(kTile, context - tile);
    find_rows(task.rows, tile, count, false, keys);
    find_rows(task.rows, tile, count, true, values);
    if (has_scales) work.key_scales = keys.scales, work.value_scales = values.scales;
    const size_t after = tile + kTile;
    find_ahead(task.rows, after, after < task.key_end && after < context ? context - after : 0, ahead);
    pack_tile<Op>(kv, keys, count, false, task.scratch.keys, ahead);
    const uint8_t* queries = static_cast<const uint8_t*>(task.queries);
    multiply<Op, true>({
        .a = queries + work.begin_row * steps * 4,
        .a_stride = steps * 4,
        .b = static_cast<const uint8_t*>(task.scratch.keys),
        .b_stride = kTile * 4,
        .num_steps = steps,
        .out = task.scratch.scores + work.begin_row * kTile,
        .out_stride = kTile,
        .factors = nullptr,
        .ahead = &ahead},
                       num_rows, kTile);
    weigh_tile<Op>(task, work, tile, ahead);
    const uint8_t* weights = static_cast<const uint8_t*>(task.scratch.weights);
    const size_t weight_stride = kTile / Op::kItems * 4;
    const Product mix = {
        .a = weights + work.begin_row * weight_stride,
        .a_stride = weight_stride,
        .b = static_cast<const uint8_t*>(task.scratch.values),
        .b_stride = columns * 4,
        .num_steps = kTile / Op::kItems,
        .out = task.state.sums + work.begin_row * columns,
        .out_stride = columns,
        .factors = task.scratch.factors + work.begin_row,
        .ahead = &ahead};
    if (is_mixed_unpacked(num_rows, kv.value_dim)) {
      mix_tile<Op>(kv, values, count, mix, num_rows);
    } else {
      pack_tile<Op>(kv, values, count, true, task.scratch.values, ahead);
      multiply<Op, false>(mix, num_rows, columns);
    }
    ahead.fetch_rest();
  }
}

void attend(const SplitTask& task) {
  if (task.is_bf16) return attend_rows<Bf16Operand>(task);
  attend_rows<FloatOperand>(task);
}

inline float exp_one(float x) { return exp_nonpositive(set_f32(x))[0]; }

void merge(const RowState& total, const RowState& part, size_t num_rows, size_t value_dim) {
  const size_t columns = round_up(value_dim, kColumnStep);
  for (size_t r = 0; r < num_rows; ++r) {
    const float a = total.largest[r], b = part.largest[r];
    const float largest = b > a ? b : a;
    const float reference = largest == -kInfinity ? 0.0f : largest;
    const float keep = exp_one(a - reference), add = exp_one(b - reference);
    total.largest[r] = largest;
    total.total[r] = total.total[r] * keep + part.total[r] * add;
    float* sums = total.sums + r * columns;
    const float* more = part.sums + r * columns;
    for (size_t c = 0; c < columns; c += kLanes)
      store_f32(sums + c, load_f32(sums + c) * set_f32(keep) + load_f32(more + c) * set_f32(add));
  }
}

template <class T>
void finish_rows(const FinishTask& task) {
  const size_t columns = round_up(task.value_dim, kColumnStep);
  for (size_t i = 0; i < task.num_rows; ++i) {
    const size_t r = task.first_row + i;
    float total = task.state.total[i], factor = 1.0f;
    if (task.sinks != nullptr) {
      const float sink = task.sinks[r % task.group], largest = task.state.largest[i];
      const float reference = sink > largest ? sink : largest;
      factor = exp_one(largest - reference);
      total = total * factor + exp_one(sink - reference);
    }
    factor = factor / total;
    const float* sums = task.state.sums + i * columns;
    T* out = static_cast<T*>(task.out) + r / task.group * task.token_stride +
             r % task.group * task.value_dim;
    size_t c = 0;
    for (; c + kLanes <= task.value_dim; c += kLanes)
      store_narrow(out + c, load_f32(sums + c) * set_f32(factor));
    for (; c < task.value_dim; ++c) narrow_one(out + c, sums[c] * factor);
  }
}

void finish(const FinishTask& task) {
  if (task.type == FloatType::kFloat32) return finish_rows<float>(task);
  finish_rows<uint16_t>(task);
}

#include "kernels/sparse/index-inl.h"

}  // namespace

extern const AttentionKernels TANDEM_ATTENTION_KERNELS;
const AttentionKernels TANDEM_ATTENTION_KERNELS = {load_queries, attend, merge, finish, score};

}  // namespace tandem
