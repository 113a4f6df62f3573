// Vectors of AVX2 with eight inputs of each of four columns, 64 bits a column, as codebooks have them;
// book_entries-inl.h unpacks to them. Entries are loaded one by one: a gather instruction takes several
// times as long as the loads that it stands for.

// The columns of the two vectors that hold eight of them: pair_steps and sum_eights return these in
// ascending order.
inline constexpr int kEightsColumns[2][4] = {{0, 1, 4, 5}, {2, 3, 6, 7}};

// Loads the entries of a vector's columns. `index(c, i)` returns the index of column c's entry, and
// of its entries i = 0 and 1 where one has four magnitudes (kWords 1).
template <int kHalf, int kWords, class ColumnIndex>
TANDEM_INLINE inline I32 load_entries(const uint32_t* book, const ColumnIndex& index) {
  constexpr auto& kColumns = kEightsColumns[kHalf];
  if constexpr (kWords == 2) {
    const double* entries = reinterpret_cast<const double*>(book);
    const auto load = [&](int a, int b) TANDEM_INLINE {
      return _mm_loadh_pd(_mm_load_sd(entries + index(a, 0)), entries + index(b, 0));
    };
    return (I32)_mm256_castpd_si256(_mm256_set_m128d(load(kColumns[2], kColumns[3]),
                                                     load(kColumns[0], kColumns[1])));
  } else {
    const auto word = [&](int column, int i) TANDEM_INLINE {
      return static_cast<int>(book[index(column, i)]);
    };
    const auto load = [&](int a, int b) TANDEM_INLINE {
      __m128i four = _mm_cvtsi32_si128(word(a, 0));
      four = _mm_insert_epi32(four, word(a, 1), 1);
      four = _mm_insert_epi32(four, word(b, 0), 2);
      return _mm_insert_epi32(four, word(b, 1), 3);
    };
    return (I32)_mm256_set_m128i(load(kColumns[2], kColumns[3]), load(kColumns[0], kColumns[1]));
  }
}

// Loads eight codes of a row, for every column.
inline I32 load_eight(const uint8_t* p) {
  long long codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  return (I32)_mm256_set1_epi64x(codes);
}

// Eight bytes that each have another bit.
inline __m256i byte_bits() {
  return _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
}
// Returns for each input its sign, in the bit of byte_bits. The signs of a column's eight inputs are
// byte kByte of its lane of `signs`, a vector of eight columns.
template <int kHalf, int kByte>
inline __m256i spread_signs(I32 signs) {
  constexpr long long kFirst = 0x0101010101010101 * (8 * kHalf + kByte);
  constexpr long long kSecond = kFirst + 0x0404040404040404;
  const __m256i places = _mm256_setr_epi64x(kFirst, kSecond, kFirst, kSecond);
  return _mm256_and_si256(_mm256_shuffle_epi8(raw(signs), places), byte_bits());
}
// Negates bytes by such signs.
inline I32 negate_eights(I32 v, __m256i signs) {
  const __m256i mask = _mm256_cmpeq_epi8(signs, byte_bits());
  return (I32)_mm256_sub_epi8(_mm256_xor_si256(raw(v), mask), mask);
}
// Does the same with an operation less for bytes above -128: 127 is positive, and 127 plus a bit is
// negative in eight bits.
inline I32 sign_eights(I32 v, __m256i signs) {
  return (I32)_mm256_sign_epi8(raw(v), _mm256_add_epi8(signs, _mm256_set1_epi8(127)));
}

// Spreads four fields of seven bits to the four bytes of a lane.
inline I32 spread_sevens(I32 v) {
  const I32 pairs = (v & 0x3fff) | ((v << 2) & 0x3fff0000);
  return (pairs & 0x007f007f) | ((pairs << 1) & 0x7f007f00);
}
// Adds to bytes of seven signs the eighth, which makes the number of negative ones even.
inline I32 complete_bytes(I32 sevens) {
  const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128,
                                    -128, 0);
  const I32 folded = low_nibbles(sevens ^ (sevens >> 4));
  return sevens | (I32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(odd), raw(folded));
}
template <int kBits>
inline I32 shift_u16(I32 v) {
  return (I32)_mm256_srli_epi16(raw(v), kBits);
}
// Returns bits [kFirst, kFirst + 4) of each lane's first byte, a byte for each.
template <int kFirst>
inline I32 spread_bits(I32 v) {
  const __m256i first = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  const __m256i bits = _mm256_set1_epi32(0x08040201 << kFirst);
  return (I32)_mm256_min_epu8(_mm256_and_si256(_mm256_shuffle_epi8(raw(v), first), bits),
                              _mm256_set1_epi8(1));
}
// Stores 16-bit numbers given as low and high bytes, four of each column, from place_pairs(column) on.
inline void store_pairs(uint16_t* p, I32 low, I32 high) {
  store_i32(p, (I32)_mm256_unpacklo_epi8(raw(low), raw(high)));
  store_i32(p + 16, (I32)_mm256_unpackhi_epi8(raw(low), raw(high)));
}
constexpr int place_pairs(int column) { return column % 4 / 2 * 16 + column / 4 * 8 + column % 2 * 4; }

// Multiplies unsigned and signed bytes, and sums pairs of the products, in 16 bits; add_u16 adds such
// sums, and widen_pairs sums pairs of them in 32 bits.
inline I32 multiply_eights(I32 magnitudes, I32 row) {
  return (I32)_mm256_maddubs_epi16(raw(magnitudes), raw(row));
}
inline I32 add_u16(I32 a, I32 b) { return (I32)_mm256_add_epi16(raw(a), raw(b)); }
inline I32 widen_pairs(I32 sums) {
  return (I32)_mm256_madd_epi16(raw(sums), _mm256_set1_epi16(1));
}
// Returns the first (kPart 0) or second word of eight columns' 64 bits.
template <int kPart>
inline I32 pick_words(I32 first, I32 second) {
  return as_i32(_mm256_shuffle_ps(as_f32(first), as_f32(second), kPart == 0 ? 0x88 : 0xdd));
}
