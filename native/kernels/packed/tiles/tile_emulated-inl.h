// The tile registers of AMX, emulated: what the instructions do, one element at a time, so that the
// code around them is tested on any machine. The twin of tile_amx-inl.h, whose interface is said
// here. Included inside the variant's anonymous namespace.
//
// Sums are kept in tiles 0 to 3, each [rows][16 columns]. A is [rows][bytes], a row of activations;
// B is [bytes / 4][16 columns][4 bytes], four inputs of int8 or two of bf16 for each column, which is
// what panels hold.

class Tiles {
 public:
  // Prepares products of `rows` rows, at most 16, in steps of `step_bytes` bytes of each row, at
  // most 64.
  Tiles(size_t rows, size_t step_bytes) : rows_(rows), step_bytes_(step_bytes) {}

  void clear() { __builtin_memset(sums_, 0, sizeof sums_); }

  // Adds A times B to the sums in tile kTile; A is signed, B unsigned. REQUIRES: tiles in ascending
  // order from 0, with the same A.
  template <int kTile>
  void add_int8(const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_stride) {
    for (size_t row = 0; row < rows_; ++row) {
      const int8_t* left = reinterpret_cast<const int8_t*>(a + row * a_stride);
      for (size_t column = 0; column < 16; ++column) {
        int32_t sum = 0;
        for (size_t k = 0; k < step_bytes_; ++k)
          sum += left[k] * b[k / 4 * b_stride + column * 4 + k % 4];
        sums_[kTile][row][column].i += sum;
      }
    }
  }

  // Adds products of pairs of bf16 in the order of the instruction: the even products are summed
  // from zero, and the odd ones apart; both sums are added, and then added to the tile.
  template <int kTile>
  void add_bf16(const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_stride) {
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t column = 0; column < 16; ++column) {
        float even = 0, odd = 0;
        for (size_t k = 0; k < step_bytes_; k += 4) {
          const uint8_t* left = a + row * a_stride + k;
          const uint8_t* right = b + k / 4 * b_stride + column * 4;
          even = __builtin_fmaf(widen(left), widen(right), even);
          odd = __builtin_fmaf(widen(left + 2), widen(right + 2), odd);
        }
        sums_[kTile][row][column].f += even + odd;
      }
    }
  }

  // Sums of one tile: 16 columns of 32 bits for each row.
  template <int kTile>
  void store(void* out, size_t stride) const {
    for (size_t row = 0; row < rows_; ++row)
      __builtin_memcpy(static_cast<uint8_t*>(out) + row * stride, sums_[kTile][row],
                       sizeof sums_[kTile][row]);
  }

 private:
  union Sum {
    int32_t i;
    float f;
  };
  static float widen(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }

  size_t rows_;
  size_t step_bytes_;
  Sum sums_[4][16][16];
};
