// How weights are coded and laid out: plain data, shared by the packer and by every ISA's kernels.
//
// Integer formats code groups of `group_size` consecutive weights of one output, unsigned:
//   symmetric     w = scale * (u - 2^(bits-1))
//   with minimum  w = scale * u + minimum
//   with zeros    w = scale * (u - zero), zero an integer of 4 bits
//   by table      w = scale * table[u], the table being that of GGUF's IQ4_NL
//   by codebook   w = scale * +-book[index], of four or eight weights at once (GGUF's IQ2 and IQ3)
//   e2m1          w = value[u] * scale * factor (NVFP4): scale an e4m3 number of 16 weights, factor an
//                 fp32 number of the output, which divides where it is stored as its opposite
// with scale and minimum in fp16, or, in superblocks of kSuperblockSize weights, integers of
// `scale_bits` bits times an fp16 number of the superblock: scale = d * (s - 2^(scale_bits-1)), with
// minimum scale = d * s and minimum = -(m * t). Unsigned codes are what VNNI's vpdpbusd wants of one operand; the
// other one, the activations, stays signed. A group size of 0 is one group a row. Float formats
// hold the weight, or what a scale multiplies: fp32; bf16; e4m3 (fp8) with an fp32 scale for blocks of
// 128 x 128, or for one output (a group size of 0); e2m1 (mxfp4) with a power of two, e8m0, for 32 inputs of one output.
//
// A matrix [N outputs, K inputs] is packed as panels of kPanelColumns outputs. A panel is one
// stream, read front to back:
//   integer: for each group  { fp16 scale[64]; fp16 minimum[64] if any; codes }
//     Codes are chunks of 4 (8 bits), 8 (4 bits), 16 (2, 3, 6 bits) or 32 inputs (5 bits). A word
//     [64][4] has byte i of a column for the inputs 4 j + i, j = 0, 1, ...:
//     8 bits: [64][4]; 4 bits: nibbles [64][4], j = 0 in the low and j = 1 in the high nibble;
//     2 bits: [64][4], j at bit 2 j;
//     5 bits: the fifth bits [64][4], j at bit j; then nibbles of 8 inputs each, [4][64][4];
//     6 bits: the upper two bits [64][4], j at bit 2 j; then nibbles [2][64][4];
//     3 bits: the lower two bits as of 2 bits; then the third ones, u16[64], where input 4 j + i is
//     bit 8 (i % 2) + 4 (i / 2) + j.
//     With zeros: nibbles [32] in the place of minima, those of columns 0 to 31 in the low ones.
//     One scale a row: fp16 scale[64], then the codes of all K.
//   in superblocks: for each { fp16 d[64]; fp16 m[64] if there are minima; levels; the codes of its
//     groups }. Levels are the V integers of scales, then of minima, in rows of 64 columns: of 8 bits
//     u8[V][64]; of 4 bits u8[V/2][64], row r with integer r in the low and r + V/2 in the high
//     nibble; of 6 bits the same of the lower four bits, then u8[V/4][64], row r with the upper two
//     bits of integer r + j V/4 at bit 2 j.
//     By codebook, scale = d * (2 s + 1) / 8 (IQ2), / 4 (IQ3_XXS) or / 1 (IQ3_S), levels of 4 bits. Codes
//     are chunks of 32 inputs, or of 16 (IQ2_XS, IQ2_S), of indices and signs as a block has them:
//     IQ2_XXS: u8[64][4] indices; u32[64], four times seven signs, and above them s, which is no level.
//     IQ2_XS: u16[64][2], indices of nine bits below seven signs.
//     IQ2_S: u8[64][2] lower bits of indices; u8[64][2] signs; nibbles [32] of upper bits, columns 0 to
//     31 in the low ones.
//     IQ3_XXS: u8[2][64][4] indices; u32[64] as in IQ2_XXS.
//     IQ3_S: u8[2][64][4] lower bits of indices; u8[64][4] signs; u8[64] upper bits.
//     Where there are seven signs the eighth makes their number even.
//   bf16:    value[ceil(K/2)][64 columns][2 k]
//   fp32:    value[K][64 columns]
//   e4m3:    for each 128 inputs { fp32 scale[16], all equal; codes[32][16 x 4 columns][4 k] },
//     where the 16 bytes of four columns hold k = 0, 1 of each, then k = 2, 3 of each.
//     One scale a row: fp32 scale[64], then the codes of all K, in whole groups of 128.
//   e2m1:    for each 32 inputs { e8m0 scale[64]; codes[4][64 columns][8 k] }, where the four bytes
//     of a column hold k = 0, 2, 4, 6 in the nibbles of the lower half and 1, 3, 5, 7 in the upper.
//   NVFP4: fp32 factor[64]; for each 16 inputs { e4m3 scale[64]; codes as of 4 bits }.
// Outputs beyond N and inputs beyond K are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

inline constexpr size_t kPanelColumns = 64;
inline constexpr int kMaxGroupSize = 128;
// Number of activations that share a quantization step if all weights of a row share one scale.
inline constexpr int kRowGroupSize = 128;
// Bytes of scales before each group of e4m3 and of e2m1 codes.
inline constexpr size_t kFloatHeaderBytes = 64;
// Weights of an output (a superblock) that share fp16 numbers, if the scales of groups are
// integers.
inline constexpr size_t kSuperblockSize = 256;
// Bytes of scales before a panel of e4m3 with one scale a row.
inline constexpr size_t kRowHeaderBytes = kPanelColumns * 4;
// Code that stands for 0 in NVFP4, whose table has twice the numbers plus this.
inline constexpr int kE2m1Centre = 12;

// Table in which codes are looked up, by the name of its GGUF type; kE2m1 is NVFP4's. From kIq2Xxs
// on they are codebooks.
enum class CodeTable : uint8_t { kNone, kIq4Nl, kE2m1, kIq2Xxs, kIq2Xs, kIq2S, kIq3Xxs, kIq3S };

// A weight format. It has no member functions, because sources compiled for a wide ISA share this
// header with all others.
struct WeightFormat {
  int32_t bits;        // 32 (fp32), 16 (bf16), 8, or 2 to 6.
  int32_t group_size;  // Weights that share a scale; 0 for values, and for one scale a row.
  bool has_minimum;
  bool is_float = false;  // 8 bits: e4m3; 4 bits: e2m1. Values are floats either way.
  int32_t scale_bits = 0;  // Of integers in superblocks, 4, 6 or 8; 0: each group has fp16 numbers.
  // Code table. `bits` is 4 for kIq4Nl and kE2m1; for codebooks it is 2 or 3, rounded down.
  CodeTable table = CodeTable::kNone;
  bool has_zeros = false;  // With minimum: it is -(scale * zero), the zero an integer of 4 bits.
};

}  // namespace tandem
