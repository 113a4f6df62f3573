// How weights are coded and laid out: plain data, shared by the packer and by every ISA's kernels.
//
// Integer formats code groups of `group_size` consecutive weights of one output, unsigned:
//   symmetric     w = scale * (u - 2^(bits-1))
//   with minimum  w = scale * u + minimum
// with scale and minimum in fp16. Unsigned codes are what VNNI's vpdpbusd wants of one operand; the
// other one, the activations, stays signed. A group size of 0 is one group a row. Float formats
// hold the weight, or what a scale multiplies: fp32; bf16; e4m3 (fp8) with an fp32 scale for blocks of
// 128 x 128, or for one output (a group size of 0); e2m1 (mxfp4) with a power of two, e8m0, for 32 inputs of one output.
//
// A matrix [N outputs, K inputs] is packed as panels of kPanelColumns outputs. A panel is one
// stream, read front to back:
//   integer: for each group  { fp16 scale[64]; fp16 minimum[64] if any; codes }
//     8 bits: codes[group/4][64 columns][4 k]; 4 bits: codes[group/8][64][4], where the byte
//     [j][column][i] holds k = 8 j + i in its low and k = 8 j + 4 + i in its high nibble.
//     One scale a row: fp16 scale[64], then the codes of all K.
//   bf16:    value[ceil(K/2)][64 columns][2 k]
//   fp32:    value[K][64 columns]
//   e4m3:    for each 128 inputs { fp32 scale[16], all equal; codes[32][16 x 4 columns][4 k] },
//     where the 16 bytes of four columns hold k = 0, 1 of each, then k = 2, 3 of each.
//     One scale a row: fp32 scale[64], then the codes of all K, in whole groups of 128.
//   e2m1:    for each 32 inputs { e8m0 scale[64]; codes[4][64 columns][8 k] }, where the four bytes
//     of a column hold k = 0, 2, 4, 6 in the nibbles of the lower half and 1, 3, 5, 7 in the upper.
// Outputs beyond N and inputs beyond K are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

inline constexpr size_t kPanelColumns = 64;
inline constexpr int kMaxGroupSize = 128;
// Activations that share a step where weights share one scale a row.
inline constexpr int kRowGroupSize = 128;
// Bytes of scales before each group of e4m3 and of e2m1 codes.
inline constexpr size_t kFloatHeaderBytes = 64;
// Bytes of scales before a panel of e4m3 with one scale a row.
inline constexpr size_t kRowHeaderBytes = kPanelColumns * 4;

// No member functions: sources compiled for a wide ISA share this header with all others.
struct WeightFormat {
  int32_t bits;        // 32 (fp32), 16 (bf16), 8 or 4.
  int32_t group_size;  // Weights that share a scale; 0 for values, and for one scale a row.
  bool has_minimum;
  bool is_float = false;  // 8 bits: e4m3; 4 bits: e2m1. Values are floats either way.
};

}  // namespace tandem
