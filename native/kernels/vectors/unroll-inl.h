// Loops that are unrolled before the compiler decides what lives in registers: with ordinary loops GCC
// keeps sums in memory. Included inside the variant's anonymous namespace.

#define TANDEM_INLINE __attribute__((always_inline))

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class Body>
TANDEM_INLINE inline void unroll(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    unroll<kCount, kFirst + 1>(body);
  }
}
