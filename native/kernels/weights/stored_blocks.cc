#include "kernels/weights/stored_blocks.h"

#include <cstring>
#include <iterator>
#include <string>

#include "kernels/weights/codebooks/codebook_blocks.h"
#include "kernels/weights/packing.h"

namespace tandem {
namespace {

// Number of rows that one task decodes: enough that a task's cost does not count, few enough that
// every thread gets some.
constexpr size_t kDecodeRows = 16;

constexpr WeightFormat kInt4Sym = {4, 32, false}, kInt4 = {4, 32, true};
constexpr WeightFormat kInt5Sym = {5, 32, false}, kInt5 = {5, 32, true};
constexpr WeightFormat kInt8 = {8, 32, false}, kInt8Fine = {8, 16, false};
constexpr WeightFormat kMxfp4Format = {4, 32, false, true};
// No format of 4 bits has groups of 16.
constexpr WeightFormat kInt8FineMinimum = {8, 16, true};

constexpr BlockType kBlockTypes[] = {
    {BlockKind::kQ4_0, "Q4_0", 32, 18, 32, 8, false, kInt4Sym, kInt4Sym},
    {BlockKind::kQ4_1, "Q4_1", 32, 20, 32, 0, true, kInt4, kInt4},
    {BlockKind::kQ5_0, "Q5_0", 32, 22, 32, 16, false, kInt5Sym, kInt5Sym},
    {BlockKind::kQ5_1, "Q5_1", 32, 24, 32, 0, true, kInt5, kInt5},
    {BlockKind::kQ8_0, "Q8_0", 32, 34, 32, 128, false, kInt8, kInt8},
    {BlockKind::kQ2K, "Q2_K", 256, 84, 16, 0, true, {2, 16, true, false, 4}, kInt8FineMinimum},
    {BlockKind::kQ3K, "Q3_K", 256, 110, 16, 4, false, {3, 16, false, false, 6}, kInt8Fine},
    {BlockKind::kQ4K, "Q4_K", 256, 144, 32, 0, true, {4, 32, true, false, 6}, kInt4},
    {BlockKind::kQ5K, "Q5_K", 256, 176, 32, 0, true, {5, 32, true, false, 6}, kInt5},
    {BlockKind::kQ6K, "Q6_K", 256, 210, 16, 32, false, {6, 16, false, false, 8}, kInt8Fine},
    {BlockKind::kIq4Nl, "IQ4_NL", 32, 18, 32, 128, false, {4, 32, false, false, 0, CodeTable::kIq4Nl}, kInt8},
    {BlockKind::kIq4Xs, "IQ4_XS", 256, 136, 32, 128, false, {4, 32, false, false, 6, CodeTable::kIq4Nl}, kInt8},
    {BlockKind::kMxfp4, "MXFP4", 32, 17, 32, 0, false, kMxfp4Format, kMxfp4Format},
    {BlockKind::kNvfp4, "NVFP4", 64, 36, 16, kE2m1Centre, false, {4, 16, false, false, 0, CodeTable::kE2m1}, kInt8Fine},
    {BlockKind::kIq2Xxs, "IQ2_XXS", 256, 66, 32, 128, false, {2, 32, false, false, 4, CodeTable::kIq2Xxs}, kInt8},
    {BlockKind::kIq2Xs, "IQ2_XS", 256, 74, 16, 128, false, {2, 16, false, false, 4, CodeTable::kIq2Xs}, kInt8Fine},
    {BlockKind::kIq2S, "IQ2_S", 256, 82, 16, 128, false, {2, 16, false, false, 4, CodeTable::kIq2S}, kInt8Fine},
    {BlockKind::kIq3Xxs, "IQ3_XXS", 256, 98, 32, 128, false, {3, 32, false, false, 4, CodeTable::kIq3Xxs}, kInt8},
    {BlockKind::kIq3S, "IQ3_S", 256, 110, 32, 128, false, {3, 32, false, false, 4, CodeTable::kIq3S}, kInt8},
};

// Twice the values of e2m1's codes.
constexpr float kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float read_half(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Multiplying by 2^112 moves the exponent from fp16's bias to fp32's, for subnormal numbers too.
  const float value = float_of_bits(magnitude << 13) * 0x1p112f;
  return sign == 0 ? value : -value;
}

// Splits bytes into nibbles: of each `width` bytes the low nibbles, then the high ones; `count`
// bytes in all.
template <size_t width>
void split_nibbles(const uint8_t* from, size_t count, uint8_t* codes) {
  for (size_t at = 0; at < count; at += width, from += width, codes += 2 * width) {
    for (size_t i = 0; i < width; ++i) codes[i] = from[i] & 15;
    for (size_t i = 0; i < width; ++i) codes[width + i] = from[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
  for (size_t i = 0; i < 32; ++i)
    codes[i] |= static_cast<uint8_t>((from[i / 8] >> (i % 8) & 1) << 4);
}

uint16_t load_half(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return half;
}

// Computes the scales and minima of a superblock from its integers and fp16 numbers.
void multiply_levels(const BlockType& type, BlockCodes* out) {
  const size_t groups = type.weights / type.group_size;
  const float scale = read_half(reinterpret_cast<const uint8_t*>(&out->halves[0]));
  if (is_codebook_kind(type.kind)) {
    for (size_t i = 0; i < groups; ++i)
      out->scales[i] = codebook_scale(type.kind, scale, out->levels[i]);
    return;
  }
  const int centre = type.has_minimum ? 0 : 1 << (type.format.scale_bits - 1);
  for (size_t i = 0; i < groups; ++i)
    out->scales[i] = scale * static_cast<float>(out->levels[i] - centre);
  if (!type.has_minimum) return;
  const float minimum = read_half(reinterpret_cast<const uint8_t*>(&out->halves[1]));
  for (size_t i = 0; i < groups; ++i)
    out->minima[i] = -(minimum * static_cast<float>(out->levels[groups + i]));
}

// Reads the first 16 bytes of Q4_K and Q5_K: two fp16 numbers, then 8 scales and 8 minima of 6 bits
// each. The first four of each kind are the lower six bits of a byte; the upper two bits of these
// bytes belong to the last four.
void split_k_scales(const uint8_t* block, BlockCodes* out) {
  out->halves[0] = load_half(block);
  out->halves[1] = load_half(block + 2);
  const uint8_t* s = block + 4;
  for (size_t i = 0; i < 4; ++i) {
    out->levels[i] = s[i] & 63;
    out->levels[8 + i] = s[i + 4] & 63;
    out->levels[i + 4] = static_cast<uint8_t>((s[i + 8] & 15) | (s[i] >> 2 & 48));
    out->levels[8 + i + 4] = static_cast<uint8_t>((s[i + 8] >> 4) | (s[i + 4] >> 2 & 48));
  }
}

// Splits bytes into codes of two bits: of each 32 bytes the lowest two bits are 32 codes, the next
// two bits the next 32 codes.
void split_pairs(const uint8_t* from, uint8_t* codes) {
  for (size_t half = 0; half < 2; ++half)
    for (size_t part = 0; part < 4; ++part)
      for (size_t i = 0; i < 32; ++i)
        codes[half * 128 + part * 32 + i] = from[half * 32 + i] >> (2 * part) & 3;
}

void split_q2_k(const uint8_t* block, BlockCodes* out) {
  for (size_t i = 0; i < 16; ++i) {
    out->levels[i] = block[i] & 15;
    out->levels[16 + i] = block[i] >> 4;
  }
  split_pairs(block + 16, out->codes);
  out->halves[0] = load_half(block + 80);
  out->halves[1] = load_half(block + 82);
}

// Takes apart Q3_K. The third bit of a code means that 4 is not subtracted from it.
void split_q3_k(const uint8_t* block, BlockCodes* out) {
  split_pairs(block + 32, out->codes);
  for (size_t i = 0; i < 256; ++i)
    out->codes[i] |= static_cast<uint8_t>((block[i % 32] >> (i / 32) & 1) << 2);
  const uint8_t* s = block + 96;
  for (size_t i = 0; i < 16; ++i) {
    const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    out->levels[i] = static_cast<uint8_t>(low | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4);
  }
  out->halves[0] = load_half(block + 108);
}

void split_iq4_xs(const uint8_t* block, BlockCodes* out) {
  out->halves[0] = load_half(block);
  const uint32_t high = load_half(block + 2);
  for (size_t i = 0; i < 8; ++i) {
    const uint32_t low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
    out->levels[i] = static_cast<uint8_t>(low | (high >> (2 * i) & 3) << 4);
  }
  split_nibbles<16>(block + 8, 128, out->codes);
}

void split_q5_k(const uint8_t* block, BlockCodes* out) {
  split_k_scales(block, out);
  split_nibbles<32>(block + 48, 128, out->codes);
  for (size_t group = 0; group < 8; ++group)
    for (size_t i = 0; i < 32; ++i)
      out->codes[group * 32 + i] |= static_cast<uint8_t>((block[16 + i] >> group & 1) << 4);
}

void split_q6_k(const uint8_t* block, BlockCodes* out) {
  split_nibbles<64>(block, 128, out->codes);
  for (size_t half = 0; half < 2; ++half)
    for (size_t part = 0; part < 4; ++part)
      for (size_t i = 0; i < 32; ++i)
        out->codes[half * 128 + part * 32 + i] |=
            static_cast<uint8_t>((block[128 + half * 32 + i] >> (2 * part) & 3) << 4);
  out->halves[0] = load_half(block + 208);
  for (size_t i = 0; i < 16; ++i) out->levels[i] = block[192 + i] ^ 128;
}

void split_mxfp4(const uint8_t* block, BlockCodes* out) {
  split_nibbles<16>(block + 1, 16, out->codes);
  out->exponent = block[0];
  // The scale is 2^(e - 128), half of what e8m0 means, because the codes are those of doubled
  // numbers.
  const uint32_t e = block[0];
  out->scales[0] = float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// Takes apart NVFP4. Like the `gguf` package, it ignores the sign of a scale and reads the code of
// NaN as 0.
void split_nvfp4(const uint8_t* block, BlockCodes* out) {
  split_nibbles<8>(block + 4, 32, out->codes);
  for (size_t group = 0; group < 4; ++group) {
    const uint8_t scale = block[group] == 0x7f ? 0 : block[group] & 0x7f;
    out->levels[group] = scale;
    // Half of the scale, because the codes are those of doubled numbers.
    out->scales[group] = float_of_bits(uint32_t{scale} << 20) * 0x1p119f;
  }
}

uint8_t look_up_code(const BlockType& type, uint8_t code) {
  if (type.format.table == CodeTable::kIq4Nl) return kIq4Codes[code];
  return type.format.table == CodeTable::kE2m1 ? kE2m1Codes[code] : code;
}

// Computes the values of a block. `codes` count from 0 if the block has minima. Multiplication and
// addition round apart: fused multiply-adds would differ from llama.cpp.
void compute_values(const BlockType& type, const BlockCodes& block, float* out) {
  if (type.kind == BlockKind::kMxfp4) {
    for (size_t i = 0; i < type.weights; ++i)
      out[i] = block.scales[0] * kE2m1Doubled[block.codes[i]];
    return;
  }
  const auto offset = static_cast<float>(type.offset);
  for (size_t group = 0; group * type.group_size < type.weights; ++group) {
    const uint8_t* codes = block.codes + group * type.group_size;
    float* values = out + group * type.group_size;
    const float scale = block.scales[group];
    for (size_t i = 0; i < type.group_size; ++i) {
      const uint8_t code = look_up_code(type, codes[i]);
      values[i] = (static_cast<float>(code) - offset) * scale;
    }
    if (!type.has_minimum) continue;
    const float minimum = block.minima[group];
    for (size_t i = 0; i < type.group_size; ++i) values[i] += minimum;
  }
}

void decode_row(const BlockRow& row, size_t columns, void* out, bool is_bf16) {
  const BlockType& type = block_type(row.kind);
  BlockCodes block;
  float values[kMaxBlockWeights];
  for (size_t k = 0; k < columns; k += type.weights) {
    split_block(row.kind, row.data + k / type.weights * type.bytes, &block);
    if (is_bf16) {
      compute_values(type, block, values);
      auto* to = static_cast<uint16_t*>(out) + k;
      for (size_t i = 0; i < type.weights; ++i) to[i] = narrow_to_bf16(values[i]);
    } else {
      compute_values(type, block, static_cast<float*>(out) + k);
    }
  }
}

}  // namespace

const uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                               129, 141, 153, 166, 181, 197, 217, 241};
const uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

uint16_t narrow_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

const BlockType& block_type(BlockKind kind) { return kBlockTypes[static_cast<size_t>(kind)]; }

Result<BlockKind> find_block_kind(std::string_view name) {
  std::string known;
  for (const BlockType& type : kBlockTypes) {
    if (name == type.name) return type.kind;
    known += (known.empty() ? "" : ", ") + std::string(type.name);
  }
  return Error{Code::kUnsupported, "kernels.find_block_kind",
               "blocks of " + std::string(name) + ": known are " + known, "kind"};
}

bool holds_blocks(const WeightFormat& format, BlockKind kind) {
  const BlockType& type = block_type(kind);
  if (format == type.format) return true;
  if (format.scale_bits != 0 || format.table != CodeTable::kNone || format.has_zeros) return false;
  const WeightFormat& plain = type.plain;
  return !format.is_float && !plain.is_float && format.bits < 16 && format.bits >= plain.bits &&
         format.has_minimum >= plain.has_minimum && format.group_size > 0 &&
         plain.group_size % format.group_size == 0;
}

void split_codes(BlockKind kind, const uint8_t* block, BlockCodes* out) {
  switch (kind) {
    case BlockKind::kQ4_0:
      split_nibbles<16>(block + 2, 16, out->codes);
      out->scales[0] = read_half(block);
      return;
    case BlockKind::kQ4_1:
      split_nibbles<16>(block + 4, 16, out->codes);
      out->scales[0] = read_half(block);
      out->minima[0] = read_half(block + 2);
      return;
    case BlockKind::kQ4K:
      split_k_scales(block, out);
      split_nibbles<32>(block + 16, 128, out->codes);
      return;
    case BlockKind::kQ5_0:
      split_nibbles<16>(block + 6, 16, out->codes);
      add_fifth_bits(block + 2, out->codes);
      out->scales[0] = read_half(block);
      return;
    case BlockKind::kQ5_1:
      split_nibbles<16>(block + 8, 16, out->codes);
      add_fifth_bits(block + 4, out->codes);
      out->scales[0] = read_half(block);
      out->minima[0] = read_half(block + 2);
      return;
    case BlockKind::kQ2K: return split_q2_k(block, out);
    case BlockKind::kQ3K: return split_q3_k(block, out);
    case BlockKind::kQ5K: return split_q5_k(block, out);
    case BlockKind::kQ6K: return split_q6_k(block, out);
    case BlockKind::kQ8_0:
      for (size_t i = 0; i < 32; ++i) out->codes[i] = block[2 + i] ^ 128;
      out->scales[0] = read_half(block);
      return;
    case BlockKind::kIq4Nl:
      split_nibbles<16>(block + 2, 16, out->codes);
      out->scales[0] = read_half(block);
      return;
    case BlockKind::kIq4Xs: return split_iq4_xs(block, out);
    case BlockKind::kMxfp4: return split_mxfp4(block, out);
    case BlockKind::kNvfp4: return split_nvfp4(block, out);
    default: return split_codebook_block(kind, block, out);
  }
}

void split_block(BlockKind kind, const uint8_t* block, BlockCodes* out) {
  split_codes(kind, block, out);
  const BlockType& type = block_type(kind);
  if (type.format.scale_bits != 0) multiply_levels(type, out);
}

Status decode_blocks(ThreadPool* pool, const BlockRow* rows, size_t num_rows, size_t columns,
                     void* out, bool is_bf16) {
  const size_t row_bytes = columns * (is_bf16 ? 2 : 4);
  const auto body = [&](size_t begin, size_t end, int) {
    for (size_t row = begin; row < end; ++row)
      decode_row(rows[row], columns, static_cast<uint8_t*>(out) + row * row_bytes, is_bf16);
  };
  if (pool != nullptr) return pool->parallel_for(num_rows, kDecodeRows, body);
  body(0, num_rows, 0);
  return {};
}

}  // namespace tandem
