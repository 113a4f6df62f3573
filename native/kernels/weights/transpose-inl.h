// A square of words, turned in registers. Included inside the variant's anonymous namespace, after
// TANDEM_VEC_HEADER and unroll-inl.h.

// Lists of lane numbers, in the form that the compiler's shuffles take.
template <size_t... kIndex>
struct Indices {};
template <size_t kCount, size_t... kIndex>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndex...> {};
template <size_t... kIndex>
struct MakeIndices<0, kIndex...> {
  typedef Indices<kIndex...> Type;
};
typedef MakeIndices<kLanes>::Type Lanes;

// Interleaves, within each 128 bits, the low (kHigh 0) or high halves of a and b, by items of kSize
// lanes.
template <size_t kSize, size_t kHigh, size_t... kIndex>
TANDEM_INLINE inline I32 unpack(I32 a, I32 b, Indices<kIndex...>) {
  return __builtin_shufflevector(
      a, b,
      (kIndex / 4 * 4 + kHigh * 2 + (kSize == 1 ? kIndex % 4 / 2 : kIndex % 2) +
       (kSize == 1 ? kIndex % 2 : kIndex % 4 / 2) * kLanes)...);
}
// Returns the even (kOdd 0) or odd 128-bit parts of a, then those of b.
template <size_t kOdd, size_t... kIndex>
TANDEM_INLINE inline I32 pick_quarters(I32 a, I32 b, Indices<kIndex...>) {
  constexpr size_t kHalf = kLanes / 2;
  return __builtin_shufflevector(
      a, b,
      (kIndex / kHalf * kLanes + (kIndex % kHalf / 4 * 2 + kOdd) * 4 % kLanes + kIndex % 4)...);
}

// Transposes a square of kLanes x kLanes words, with instructions that need no registers beside
// their operands.
TANDEM_INLINE inline void transpose(I32 (&m)[kLanes]) {
  constexpr int kGroups = kLanes / 4;
  // c[k][group]: columns 4 * quarter + k of the group's four rows, a column in each 128 bits.
  I32 c[4][kGroups];
  unroll<kGroups>([&](auto group) TANDEM_INLINE {
    constexpr int g = decltype(group)::value;
    const I32 low01 = unpack<1, 0>(m[4 * g], m[4 * g + 1], Lanes{});
    const I32 high01 = unpack<1, 1>(m[4 * g], m[4 * g + 1], Lanes{});
    const I32 low23 = unpack<1, 0>(m[4 * g + 2], m[4 * g + 3], Lanes{});
    const I32 high23 = unpack<1, 1>(m[4 * g + 2], m[4 * g + 3], Lanes{});
    c[0][g] = unpack<2, 0>(low01, low23, Lanes{});
    c[1][g] = unpack<2, 1>(low01, low23, Lanes{});
    c[2][g] = unpack<2, 0>(high01, high23, Lanes{});
    c[3][g] = unpack<2, 1>(high01, high23, Lanes{});
  });
  unroll<4>([&](auto column) TANDEM_INLINE {
    constexpr int k = decltype(column)::value;
    if constexpr (kGroups == 1) {
      m[k] = c[k][0];
    } else if constexpr (kGroups == 2) {
      m[k] = pick_quarters<0>(c[k][0], c[k][1], Lanes{});
      m[4 + k] = pick_quarters<1>(c[k][0], c[k][1], Lanes{});
    } else {
      const I32 even01 = pick_quarters<0>(c[k][0], c[k][1], Lanes{});
      const I32 odd01 = pick_quarters<1>(c[k][0], c[k][1], Lanes{});
      const I32 even23 = pick_quarters<0>(c[k][2], c[k][3], Lanes{});
      const I32 odd23 = pick_quarters<1>(c[k][2], c[k][3], Lanes{});
      m[k] = pick_quarters<0>(even01, even23, Lanes{});
      m[8 + k] = pick_quarters<1>(even01, even23, Lanes{});
      m[4 + k] = pick_quarters<0>(odd01, odd23, Lanes{});
      m[12 + k] = pick_quarters<1>(odd01, odd23, Lanes{});
    }
  });
}
