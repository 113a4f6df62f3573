#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/weights/packing.h"

namespace tandem {
namespace {

constexpr size_t kStepBytes = kPanelColumns * 4;
// Number of outputs that share a scale in e4m3.
constexpr size_t kLayoutBlockRows = 128;
constexpr uint16_t kFp16Exponent = 0x7c00;

// Sizes and offsets of one panel's format, computed once for all groups.
struct Layout {
  WeightFormat format;
  size_t unit;           // Inputs of a group; of the padding, where a row has one scale.
  size_t row_bytes;      // Of scales or factors before the panel, where a row has one.
  size_t header_bytes;   // Before the codes of each group.
  uint8_t padding;       // The code of what is not there.
  bool is_row;
};

Layout make_layout(const WeightFormat& format) {
  const bool is_row = format.group_size == 0;
  const size_t row_bytes = format.table == CodeTable::kE2m1 ? kRowHeaderBytes
                           : !is_row                        ? 0
                           : format.is_float                ? kRowHeaderBytes
                                                            : kPanelColumns * 2;
  const size_t unit = unit_size(format);
  const size_t code_bytes = kPanelColumns * unit * static_cast<size_t>(format.bits) / 8;
  const bool is_centred = has_codes(format) && !format.has_minimum;
  return {format, unit, row_bytes, group_bytes(format, unit) - code_bytes,
          static_cast<uint8_t>(is_centred ? 1 << (format.bits - 1) : 0), is_row};
}

Error refuse(size_t row, const std::string& what) {
  return Error{Code::kUnsupported, "kernels.pack_codes",
               "output " + std::to_string(row) + " has " + what +
                   ": repair the checkpoint, or choose another format",
               "codes"};
}

#include "kernels/weights/place_codes-inl.h"

bool is_code(const WeightFormat& format, uint8_t code) {
  if (format.bits < 8) return code < 1 << format.bits;
  return !format.is_float || (code & 0x7f) != 0x7f;
}

bool is_finite_fp16(uint16_t half) { return (half & kFp16Exponent) != kFp16Exponent; }

void place_codes(const WeightFormat& format, const uint8_t* codes, size_t count, size_t column,
                 uint8_t* out) {
  if (!format.is_float) return place_int_codes(format.bits, codes, count, column, out);
  if (format.bits == 4) {
    // The lower half stores the even ones of eight codes.
    uint8_t* at = out + column * 4;
    for (size_t k = 0; k < count; k += 8, at += kStepBytes) {
      const uint8_t* c = codes + k;
      for (size_t i = 0; i < 4; ++i) {
        const size_t low = i < 2 ? 4 * i : 4 * (i - 2) + 1;
        at[i] = static_cast<uint8_t>(c[low] | c[low + 2] << 4);
      }
    }
    return;
  }
  uint8_t* at = out + column / 4 * 16 + column % 4 * 2;
  for (size_t k = 0; k < count; k += 4, at += kStepBytes) {
    std::memcpy(at, codes + k, 2);
    std::memcpy(at + 8, codes + k + 2, 2);
  }
}

// Writes a zero point, which is given in fp16, to its nibble.
Status place_zero(size_t row, uint16_t half, size_t column, uint8_t* nibbles) {
  // The zero point must be a whole number from 1 to 15 in fp16; the exponent says how many upper
  // bits of the mantissa are before the binary point.
  const int exponent = (half >> 10) - 15;
  const uint32_t fraction = (half & 0x3ffu) | 0x400u;
  const bool is_whole =
      exponent >= 0 && exponent < 4 && (fraction & ((0x400u >> exponent) - 1)) == 0;
  if (half != 0 && !is_whole) return refuse(row, "a zero point that is no code");
  const auto zero = static_cast<uint8_t>(half == 0 ? 0 : fraction >> (10 - exponent));
  uint8_t& shared = nibbles[column % (kPanelColumns / 2)];
  if (column < kPanelColumns / 2)
    shared = static_cast<uint8_t>((shared & 0xf0) | zero);
  else
    shared = static_cast<uint8_t>((shared & 0x0f) | zero << 4);
  return {};
}

// Writes the fp32 factor of one output to the beginning of a panel of NVFP4.
Status place_factor(const MatrixView& matrix, size_t row, size_t column, uint8_t* panel) {
  const float factor = matrix.factors[row];
  if (!std::isfinite(factor) || factor == 0)
    return refuse(row, "a scale of its tensor that is zero or not finite");
  std::memcpy(panel + column * sizeof factor, &factor, sizeof factor);
  return {};
}

// Writes the scale and the minimum of a group, or of a whole row, to one column.
Status place_scale(const Layout& layout, const MatrixView& matrix, size_t row, size_t group,
                   size_t num_groups, size_t column, uint8_t* out) {
  if (layout.format.table == CodeTable::kE2m1) {
    const uint8_t scale = static_cast<const uint8_t*>(matrix.scales)[row * num_groups + group];
    if (scale >= 0x7f) return refuse(row, "a scale that is negative or no number");
    out[column] = scale;
    return {};
  }
  if (!layout.format.is_float) {
    const size_t at = row * num_groups + group;
    const uint16_t scale = static_cast<const uint16_t*>(matrix.scales)[at];
    const uint16_t minimum = layout.format.has_minimum ? matrix.minima[at] : 0;
    if (!is_finite_fp16(scale) || !is_finite_fp16(minimum))
      return refuse(row, "a scale or minimum that is not finite");
    std::memcpy(out + column * 2, &scale, 2);
    if (layout.format.has_zeros)
      return place_zero(row, minimum, column, out + kPanelColumns * 2);
    if (layout.format.has_minimum)
      std::memcpy(out + kPanelColumns * 2 + column * 2, &minimum, 2);
    return {};
  }
  const bool is_block = layout.format.bits == 8 && !layout.is_row;
  const size_t scale_row = is_block ? row / kLayoutBlockRows : row;
  const float scale = static_cast<const float*>(matrix.scales)[scale_row * num_groups + group];
  if (layout.format.bits == 8) {
    if (!std::isfinite(scale)) return refuse(row, "a scale that is not finite");
    std::memcpy(out + (layout.is_row ? column : column % 16) * sizeof scale, &scale, sizeof scale);
    return {};
  }
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  const uint32_t exponent = bits >> 23;
  if ((bits & 0x7fffff) != 0 || exponent < 1 || exponent > 254)
    return refuse(row, "a scale that is not finite or no power of two from 2^-126");
  out[column] = static_cast<uint8_t>(exponent);
  return {};
}

}  // namespace

Status lay_out_panel(const WeightFormat& format, const PanelSource& source, uint8_t* panel) {
  const MatrixView& matrix = *source.matrix;
  const Layout layout = make_layout(format);
  const size_t size = source.last_k - source.first_k;
  const size_t num_columns = std::min(kPanelColumns, matrix.rows - source.first_row);
  const size_t num_groups = layout.is_row ? 1 : (matrix.columns + layout.unit - 1) / layout.unit;
  if (num_columns < kPanelColumns) std::memset(panel, 0, panel_bytes(format, size));
  uint8_t* body = panel + layout.row_bytes;
  for (size_t c = 0; layout.row_bytes != 0 && c < num_columns; ++c) {
    const size_t row = source.first_row + c;
    const Status placed = layout.is_row ? place_scale(layout, matrix, row, 0, num_groups, c, panel)
                                        : place_factor(matrix, row, c, panel);
    if (!placed.is_ok()) return placed;
  }
  uint8_t codes[kMaxGroupSize];
  for (size_t k = 0; k < size; k += layout.unit, body += group_bytes(format, layout.unit)) {
    const size_t count = std::min(layout.unit, size - k);
    for (size_t c = 0; c < num_columns; ++c) {
      const size_t row = source.first_row + c;
      const uint8_t* from =
          static_cast<const uint8_t*>(matrix.data) + row * matrix.columns + source.first_k + k;
      std::memcpy(codes, from, count);
      std::memset(codes + count, layout.padding, layout.unit - count);
      for (size_t i = 0; i < count; ++i)
        if (!is_code(format, codes[i]))
          return refuse(row, "the code " + std::to_string(codes[i]) + ", which is no number");
      if (!layout.is_row) {
        const size_t group = (source.first_k + k) / layout.unit;
        const Status placed = place_scale(layout, matrix, row, group, num_groups, c, body);
        if (!placed.is_ok()) return placed;
      }
      place_codes(format, codes, layout.unit, c, body + layout.header_bytes);
    }
    // In e4m3, all copies of a block's scale are written alike, even if the block has few outputs.
    if (format.is_float && format.bits == 8 && !layout.is_row)
      for (size_t i = 4; i < kFloatHeaderBytes; i += 4) std::memcpy(body + i, body, 4);
  }
  return {};
}

}  // namespace tandem
