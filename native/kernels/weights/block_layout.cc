#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/weights/codebooks/codebook_blocks.h"
#include "kernels/weights/packing.h"
#include "kernels/weights/stored_blocks.h"

namespace tandem {
namespace {

// Number of inputs of a row that are taken apart together: whole blocks of every kind, and few
// enough that what 64 rows write stays in L1.
constexpr size_t kChunkInputs = kMaxBlockWeights;
constexpr size_t kChunkGroups = kMaxBlockGroups;
constexpr size_t kCacheLineBytes = 64;
// Bytes of a panel's codes for four or eight inputs of all its outputs.
constexpr size_t kPieceBytes = kPanelColumns * 4;

#include "kernels/weights/place_codes-inl.h"

// e2m1 codes of half of each number; 0.25 and 0.75 are rounded to even.
constexpr uint8_t kHalvedE2m1[8] = {0, 0, 1, 2, 2, 3, 4, 5};

// A chunk of one row in the panel's format, as it is written to one column.
struct ChunkCodes {
  alignas(64) uint8_t codes[kChunkInputs];
  uint16_t scales[kChunkGroups];
  uint16_t minima[kChunkGroups];
};

// Rounds a float to fp16, to nearest; infinite beyond its range.
uint16_t narrow_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // The value is subnormal in fp16, where a step is 2^-24: adding 0.5 in fp32 rounds to that
    // step.
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, sizeof rounded);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

float widen_half(uint16_t half) {
  const uint32_t magnitude = uint32_t{half & 0x7fffu} << 13;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  return (half & 0x8000 ? -0x1p112f : 0x1p112f) * value;
}

bool is_infinite_half(uint16_t half) { return (half & 0x7c00) == 0x7c00; }

Error refuse_block(size_t row, const char* what) {
  return Error{Code::kUnsupported, "kernels.pack_blocks",
               "output " + std::to_string(row) + " has " + what +
                   ": repair the checkpoint, or choose another format",
               "blocks"};
}

// The conversion of a kind's codes to those of the panel's format.
struct Recoding {
  uint8_t added;        // To each code.
  float centre;         // Where minima are made here: the code of weight 0, else 0.
  bool is_by_table;     // Indices become what they stand for.
};

Recoding plan_recoding(const WeightFormat& format, const BlockType& type) {
  if (type.has_minimum || format == type.format) return {0, 0, false};
  const int plain_centre = 1 << (type.plain.bits - 1);
  const bool is_by_table =
      type.format.table == CodeTable::kIq4Nl || type.format.table == CodeTable::kE2m1;
  if (format.has_minimum)
    return {static_cast<uint8_t>(plain_centre - type.offset), static_cast<float>(plain_centre),
            is_by_table};
  return {static_cast<uint8_t>((1 << (format.bits - 1)) - type.offset), 0, is_by_table};
}

// Takes apart `num_weights` weights of a row, whole blocks with integer codes. Returns false if a
// scale is beyond fp16.
bool take_integers(const WeightFormat& format, const BlockType& type, const uint8_t* blocks,
                   size_t num_weights, ChunkCodes* out) {
  const Recoding recoding = plan_recoding(format, type);
  const size_t num_groups = type.weights / type.group_size;
  const auto times = type.group_size / static_cast<size_t>(format.group_size);
  const uint8_t* table = type.format.table == CodeTable::kE2m1 ? kE2m1Codes : kIq4Codes;
  const bool is_e2m1 = format.table == CodeTable::kE2m1;
  BlockCodes block;
  size_t group = 0;
  bool is_finite = true;
  for (size_t k = 0; k < num_weights; k += type.weights, blocks += type.bytes) {
    split_block(type.kind, blocks, &block);
    for (size_t i = 0; i < type.weights; ++i) {
      const uint8_t code = recoding.is_by_table ? table[block.codes[i]] : block.codes[i];
      out->codes[k + i] = static_cast<uint8_t>(code + recoding.added);
    }
    for (size_t g = 0; g < num_groups; ++g) {
      const uint16_t scale = is_e2m1 ? block.levels[g] : narrow_to_half(block.scales[g]);
      uint16_t minimum = 0;
      if (type.has_minimum) minimum = narrow_to_half(block.minima[g]);
      else if (format.has_minimum) minimum = narrow_to_half(widen_half(scale) * -recoding.centre);
      is_finite &= !is_infinite_half(scale) && !is_infinite_half(minimum);
      for (size_t i = 0; i < times; ++i, ++group) {
        out->scales[group] = scale;
        out->minima[group] = minimum;
      }
    }
  }
  return is_finite;
}

// Copies blocks of Q8_0 to one column of a panel in their own format. `to` points to the group of
// the first block, `piece` is the bytes of a group. Returns false if a scale is not finite.
bool place_q8_0(const uint8_t* blocks, size_t num_weights, size_t column, size_t piece,
                uint8_t* to) {
  const BlockType& type = block_type(BlockKind::kQ8_0);
  bool is_finite = true;
  for (size_t k = 0; k < num_weights; k += type.weights, blocks += type.bytes, to += piece) {
    uint16_t scale;
    std::memcpy(&scale, blocks, 2);
    is_finite &= !is_infinite_half(scale);
    std::memcpy(to + column * 2, &scale, 2);
    uint8_t* codes = to + kPanelColumns * 2 + column * 4;
    for (size_t i = 0; i < type.weights; i += 4, codes += kPieceBytes) {
      uint32_t four;
      std::memcpy(&four, blocks + 2 + i, 4);
      four ^= 0x80808080u;  // Plus 128, without a sign.
      std::memcpy(codes, &four, 4);
    }
  }
  return is_finite;
}

// Takes apart blocks of MXFP4, whose scales are e8m0. The kernels have no scale 2^-127, so it
// becomes 2^-126 and the codes are halved.
bool take_floats(const BlockType& type, const uint8_t* blocks, size_t num_weights,
                 ChunkCodes* out) {
  BlockCodes block;
  bool is_finite = true;
  for (size_t k = 0; k < num_weights; k += type.weights, blocks += type.bytes) {
    split_block(type.kind, blocks, &block);
    is_finite &= block.exponent != 255;
    out->scales[k / type.weights] = std::max<uint8_t>(block.exponent, 1);
    for (size_t i = 0; i < type.weights; ++i) {
      const uint8_t code = block.codes[i];
      out->codes[k + i] =
          block.exponent == 0 ? static_cast<uint8_t>(kHalvedE2m1[code & 7] | (code & 8)) : code;
    }
  }
  return is_finite;
}

void write_codes(const WeightFormat& format, const uint8_t* codes, size_t column, uint8_t* to) {
  const auto size = static_cast<size_t>(format.group_size);
  if (!format.is_float) return place_int_codes(format.bits, codes, size, column, to);
  to += column * 4;
  for (size_t k = 0; k < size; k += 8, to += kPieceBytes) {
    // The lower half stores the even ones of eight codes: 0 2, 4 6, 1 3, 5 7.
    const uint8_t* c = codes + k;
    const uint32_t packed = uint32_t{c[0]} | uint32_t{c[2]} << 4 | uint32_t{c[4]} << 8 |
                            uint32_t{c[6]} << 12 | uint32_t{c[1]} << 16 | uint32_t{c[3]} << 20 |
                            uint32_t{c[5]} << 24 | uint32_t{c[7]} << 28;
    std::memcpy(to, &packed, 4);
  }
}

// Writes to one column the integers of a superblock's scales and minima, in the layout of
// weight_format.h.
void write_levels(const WeightFormat& format, const uint8_t* levels, size_t column, uint8_t* rows) {
  const size_t count = count_levels(format);
  const auto row = [&](size_t r) -> uint8_t& { return rows[r * kPanelColumns + column]; };
  if (format.scale_bits == 8) {
    for (size_t i = 0; i < count; ++i) row(i) = levels[i];
    return;
  }
  for (size_t r = 0; r < count / 2; ++r)
    row(r) = static_cast<uint8_t>((levels[r] & 15) | levels[r + count / 2] << 4);
  if (format.scale_bits == 4) return;
  const size_t quarter = count / 4;
  for (size_t r = 0; r < quarter; ++r) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 4; ++j) bits |= uint32_t{levels[r + j * quarter]} >> 4 << (2 * j);
    row(count / 2 + r) = static_cast<uint8_t>(bits);
  }
}

// Copies a superblock to one column in its own format. Returns false if its fp16 numbers are not
// finite.
bool write_superblock(const WeightFormat& format, const BlockRow& stored, size_t column, uint8_t* to) {
  BlockCodes block;
  split_codes(stored.kind, stored.data, &block);
  const size_t num_halves = format.has_minimum ? 2 : 1;
  const auto size = static_cast<size_t>(format.group_size);
  for (size_t i = 0; i < num_halves; ++i) {
    if (is_infinite_half(block.halves[i])) return false;
    std::memcpy(to + (i * kPanelColumns + column) * 2, &block.halves[i], 2);
  }
  write_levels(format, block.levels, column, to + num_halves * kPanelColumns * 2);
  uint8_t* codes = to + group_bytes(format, kSuperblockSize) - code_bytes(format, kSuperblockSize);
  if (is_codebook_kind(stored.kind)) {
    place_codebook_block(stored.kind, stored.data, column, codes);
    return true;
  }
  const size_t bytes = code_bytes(format, size);
  for (size_t k = 0; k < kSuperblockSize; k += size, codes += bytes)
    write_codes(format, block.codes + k, column, codes);
  return true;
}

// Lays out a panel of superblocks. REQUIRES: whole superblocks, all rows of the kind whose own
// format this is.
Status lay_out_superblocks(const WeightFormat& format, const PanelSource& source, uint8_t* panel) {
  const MatrixView& matrix = *source.matrix;
  const size_t num_columns = std::min(kPanelColumns, matrix.rows - source.first_row);
  const size_t bytes = group_bytes(format, kSuperblockSize);
  for (size_t k = source.first_k; k < source.last_k; k += kSuperblockSize, panel += bytes) {
    for (size_t c = 0; c < num_columns; ++c) {
      const BlockRow& row = matrix.block_rows[source.first_row + c];
      const BlockType& type = block_type(row.kind);
      const uint8_t* stored = row.data + k / kSuperblockSize * type.bytes;
      if (k + kSuperblockSize < source.last_k)
        for (size_t i = 0; i < type.bytes; i += kCacheLineBytes)
          __builtin_prefetch(stored + type.bytes + i);
      if (!write_superblock(format, {stored, row.kind}, c, panel))
        return refuse_block(source.first_row + c, "a scale or minimum that is not finite");
    }
  }
  return {};
}

}  // namespace

Status lay_out_blocks(const WeightFormat& format, const PanelSource& source, uint8_t* panel) {
  const MatrixView& matrix = *source.matrix;
  const size_t num_columns = std::min(kPanelColumns, matrix.rows - source.first_row);
  if (num_columns < kPanelColumns)
    std::memset(panel, 0, panel_bytes(format, source.last_k - source.first_k));
  if (format.scale_bits != 0) return lay_out_superblocks(format, source, panel);
  const auto size = static_cast<size_t>(format.group_size);
  const size_t piece = group_bytes(format, size);
  const size_t num_code_bytes = code_bytes(format, size);
  const bool is_byte = format.is_float || format.table == CodeTable::kE2m1;
  if (format.table == CodeTable::kE2m1) {
    // The factor of each output is 1, because a GGUF file has none.
    constexpr float kOne = 1.0f;
    for (size_t c = 0; c < num_columns; ++c) std::memcpy(panel + c * sizeof kOne, &kOne, sizeof kOne);
    panel += kRowHeaderBytes;
  }
  ChunkCodes chunk;
  // Begin at a chunk's start, since a part of a matrix may begin within a block.
  for (size_t first = source.first_k / kChunkInputs * kChunkInputs; first < source.last_k;
       first += kChunkInputs) {
    const size_t count = std::min(kChunkInputs, matrix.columns - first);
    const size_t begin = std::max(first, source.first_k);
    const size_t end = std::min(first + count, source.last_k);
    for (size_t c = 0; c < num_columns; ++c) {
      const BlockRow& row = matrix.block_rows[source.first_row + c];
      const BlockType& type = block_type(row.kind);
      const uint8_t* blocks = row.data + first / type.weights * type.bytes;
      // Prefetch the next chunk, which the hardware does not foresee among so many rows.
      const size_t chunk_bytes = kChunkInputs / type.weights * type.bytes;
      if (end < source.last_k)
        for (size_t i = 0; i < chunk_bytes; i += kCacheLineBytes)
          __builtin_prefetch(blocks + chunk_bytes + i);
      if (type.kind == BlockKind::kQ8_0 && format == type.format) {
        uint8_t* group = panel + (begin - source.first_k) / size * piece;
        const uint8_t* own = blocks + (begin - first) / type.weights * type.bytes;
        if (!place_q8_0(own, end - begin, c, piece, group))
          return refuse_block(source.first_row + c, "a scale or minimum that is not finite");
        continue;
      }
      const bool is_finite = format.is_float
                                 ? take_floats(type, blocks, count, &chunk)
                                 : take_integers(format, type, blocks, count, &chunk);
      if (!is_finite)
        return refuse_block(source.first_row + c, "a scale or minimum that is not finite");
      for (size_t k = begin; k < end; k += size) {
        uint8_t* body = panel + (k - source.first_k) / size * piece;
        const size_t group = (k - first) / size;
        if (is_byte) {
          body[c] = static_cast<uint8_t>(chunk.scales[group]);
        } else {
          std::memcpy(body + c * 2, &chunk.scales[group], 2);
          if (format.has_minimum)
            std::memcpy(body + kPanelColumns * 2 + c * 2, &chunk.minima[group], 2);
        }
        write_codes(format, chunk.codes + (k - first), c, body + (piece - num_code_bytes));
      }
    }
  }
  return {};
}

}  // namespace tandem
