// How weights are coded and laid out: plain data, shared by the packer and by every ISA's kernels.
//
// Integer formats code groups of `group_size` consecutive weights of one output, unsigned:
//   symmetric     w = scale * (u - 2^(bits-1))
//   with minimum  w = scale * u + minimum
// with scale and minimum in fp16. Unsigned codes are what VNNI's vpdpbusd wants of one operand; the
// other one, the activations, stays signed.
//
// A matrix [N outputs, K inputs] is packed as panels of kPanelColumns outputs. A panel is one
// stream, read front to back:
//   integer: for each group  { fp16 scale[64]; fp16 minimum[64] if any; codes }
//     8 bits: codes[group/4][64 columns][4 k]; 4 bits: codes[group/8][64][4], where the byte
//     [j][column][i] holds k = 8 j + i in its low and k = 8 j + 4 + i in its high nibble.
//   bf16:    value[ceil(K/2)][64 columns][2 k]
// Outputs beyond N and inputs beyond K are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

inline constexpr size_t kPanelColumns = 64;
inline constexpr int kMaxGroupSize = 128;

// No member functions: sources compiled for a wide ISA share this header with all others.
struct WeightFormat {
  int32_t bits;        // 16 (bf16), 8 or 4.
  int32_t group_size;  // 0 for bf16.
  bool has_minimum;
};

}  // namespace tandem
