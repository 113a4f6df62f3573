#include "kernels/packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

namespace tandem {
namespace {

constexpr float kLargestFp16 = 65504.0f;
// Added to a double of up to 2^51, leaves it rounded to nearest even (1.5 * 2^52).
constexpr double kRounder = 6755399441055744.0;

float widen_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t narrow_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// REQUIRES: |value| <= kLargestFp16.
uint16_t narrow_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) {
    // Subnormal in fp16: its step is 2^-24, and adding 0.5 in fp32 rounds to that step.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

float widen_fp16(uint16_t half) {
  const float magnitude = std::bit_cast<float>(static_cast<uint32_t>(half & 0x7fff) << 13);
  return (half & 0x8000 ? -0x1p112f : 0x1p112f) * magnitude;
}

// Round to nearest even without SSE4.1 or a library call.
int round_to_int(double value) { return static_cast<int>(value + kRounder - kRounder); }

struct CodedGroup {
  uint16_t scale;
  uint16_t minimum;
  uint8_t codes[kMaxGroupSize];
};

// Returns false if a weight is not finite or the scale does not fit.
bool code_group(const WeightFormat& format, const float* w, CodedGroup& out) {
  float low = w[0], high = w[0], peak = w[0];
  bool is_finite = true;
  for (int i = 0; i < format.group_size; ++i) {
    is_finite &= std::isfinite(w[i]);
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
    if (std::fabs(w[i]) > std::fabs(peak)) peak = w[i];
  }
  const int num_codes = 1 << format.bits;
  // Eight bits have a step to spare and stay even about zero. Four bits have not: the largest
  // weight gets the code -8, whatever its sign, which makes the step negative where it is positive.
  const double wanted = format.has_minimum   ? (double{high} - double{low}) / (num_codes - 1)
                        : format.bits == 8 ? std::fabs(double{peak}) / 127
                                           : double{peak} / -8;
  const double base = format.has_minimum ? low : 0.0;
  if (!is_finite || std::fabs(wanted) > kLargestFp16 || std::fabs(base) > kLargestFp16)
    return false;
  out.scale = narrow_to_fp16(static_cast<float>(wanted));
  out.minimum = narrow_to_fp16(static_cast<float>(base));
  // Coding against the rounded scale and minimum makes their rounding free.
  const double scale = widen_fp16(out.scale);
  const double minimum = widen_fp16(out.minimum);
  const int offset = format.has_minimum ? 0 : num_codes / 2;
  const int lowest = format.bits == 8 && !format.has_minimum ? 1 : 0;
  for (int i = 0; i < format.group_size; ++i) {
    const double ratio = scale == 0 ? 0.0 : (double{w[i]} - minimum) / scale;
    const double bounded = std::clamp(ratio, -256.0, 256.0);
    const int code = round_to_int(bounded) + offset;
    out.codes[i] = static_cast<uint8_t>(std::clamp(code, lowest, num_codes - 1));
  }
  return true;
}

void read_weights(const MatrixView& matrix, size_t row, size_t column, size_t count, float* out) {
  const size_t at = row * matrix.columns + column;
  if (matrix.is_bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(matrix.data) + at;
    for (size_t i = 0; i < count; ++i) out[i] = widen_bf16(source[i]);
  } else {
    std::memcpy(out, static_cast<const float*>(matrix.data) + at, count * sizeof(float));
  }
}

Error refuse_weights(const char* what, size_t row) {
  return {Code::kUnsupported, "kernels.pack",
          "output " + std::to_string(row) + " of a matrix holds " + what +
              ": repair the checkpoint, or choose another format",
          "weights"};
}

Status pack_bf16_column(const MatrixView& matrix, size_t row, size_t column, uint8_t* out) {
  uint16_t* values = reinterpret_cast<uint16_t*>(out) + 2 * column;
  for (size_t k = 0; k < matrix.columns; ++k) {
    float w;
    read_weights(matrix, row, k, 1, &w);
    const uint16_t value = narrow_to_bf16(w);
    if (!std::isfinite(w) || !std::isfinite(widen_bf16(value)))
      return refuse_weights("a weight that is not finite in bf16", row);
    values[k / 2 * kPanelColumns * 2 + k % 2] = value;
  }
  return {};
}

void place_codes(const WeightFormat& format, const CodedGroup& group, size_t column, uint8_t* out) {
  for (int k = 0; k < format.group_size; ++k) {
    if (format.bits == 8) {
      out[(static_cast<size_t>(k / 4) * kPanelColumns + column) * 4 + k % 4] = group.codes[k];
    } else {
      const int shift = k / 4 % 2 * 4;
      out[(static_cast<size_t>(k / 8) * kPanelColumns + column) * 4 + k % 4] |=
          static_cast<uint8_t>(group.codes[k] << shift);
    }
  }
}

}  // namespace

Status check_format(const WeightFormat& format) {
  const int g = format.group_size;
  const bool is_group = g == 32 || g == 64 || g == 128 || (g == 16 && format.bits == 8);
  if (format.bits == 16 && g == 0 && !format.has_minimum) return {};
  if ((format.bits == 8 || format.bits == 4) && is_group) return {};
  return Error{Code::kUnsupported, "kernels.check_format",
               std::to_string(format.bits) + " bits in groups of " + std::to_string(g) +
                   ": there are kernels for bf16, 8 bits in groups of 16 to 128 and 4 bits in "
                   "groups of 32 to 128",
               "format"};
}

Status check_size(const WeightFormat& format, size_t size, const char* name) {
  if (size > 0 && (format.bits == 16 || size % static_cast<size_t>(format.group_size) == 0))
    return {};
  return Error{Code::kShape, "kernels.check_size",
               std::string(name) + " " + std::to_string(size) + " is not a multiple of the group of " +
                   std::to_string(format.group_size) + " weights: choose a smaller group, or bf16",
               name};
}

size_t panel_bytes(const WeightFormat& format, size_t size) {
  if (format.bits == 16) return (size + 1) / 2 * 2 * kPanelColumns * 2;
  const size_t group_size = static_cast<size_t>(format.group_size);
  const size_t header = kPanelColumns * 2 * (format.has_minimum ? 2 : 1);
  const size_t codes = kPanelColumns * group_size * static_cast<size_t>(format.bits) / 8;
  return size / group_size * (header + codes);
}

Status pack_panel(const WeightFormat& format, const MatrixView& matrix, size_t first_row,
                  uint8_t* out) {
  const size_t num_columns = std::min(kPanelColumns, matrix.rows - first_row);
  std::memset(out, 0, panel_bytes(format, matrix.columns));
  if (format.bits == 16) {
    for (size_t c = 0; c < num_columns; ++c) {
      Status status = pack_bf16_column(matrix, first_row + c, c, out);
      if (!status.is_ok()) return status;
    }
    return {};
  }
  const size_t group_size = static_cast<size_t>(format.group_size);
  const size_t header = kPanelColumns * (format.has_minimum ? 2 : 1);
  const size_t group_bytes = panel_bytes(format, group_size);
  float w[kMaxGroupSize];
  CodedGroup group;
  for (size_t k = 0; k < matrix.columns; k += group_size, out += group_bytes) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(out);
    for (size_t c = 0; c < num_columns; ++c) {
      read_weights(matrix, first_row + c, k, group_size, w);
      if (!code_group(format, w, group))
        return refuse_weights("a weight that is not finite or beyond fp16 scales", first_row + c);
      scales[c] = group.scale;
      if (format.has_minimum) scales[kPanelColumns + c] = group.minimum;
      place_codes(format, group, c, out + header * 2);
    }
  }
  return {};
}

}  // namespace tandem
