// Integer formats: how their codes are unpacked and their scales applied. A format is one type here,
// which the products of multiply-inl.h and multiply_tiles-inl.h and the gradients of backward-inl.h
// share. Included by multiply-inl.h; weight_format.h says where what lies.

// Kinds of scales beside the codes: fp16 numbers, or integers times fp16 numbers of a superblock.
enum class Scales { kGroup, kGroupMinimum, kGroupZero, kGroupE4m3, kRow };

constexpr size_t kScaleBytes = kPanelColumns * 2;

// Returns the largest power of two that exceeds neither `most` nor the steps of a group (4 inputs
// each). A group size that is known only at run time counts as 32 inputs.
constexpr int count_narrow_steps(int most, int group_size) {
  const int whole = group_size == 16 ? 4 : 8;
  int steps = 0;
  for (int n = 1; n <= most && n <= whole; n *= 2) steps = n;
  return steps;
}

// An integer weight format as a type. kGroupSize 0: the group size is a field of the format, known
// only at run time.
template <int kCodeBits, Scales kKind, int kLevelBits = 0, int kGroupSize = 0,
          CodeTable kCodeTable = CodeTable::kNone>
struct IntFormat {
  static constexpr int kBits = kCodeBits;
  static constexpr Scales kScales = kKind;
  static constexpr int kScaleBits = kLevelBits;
  static constexpr CodeTable kTable = kCodeTable;
  static constexpr bool kHasTable = kTable != CodeTable::kNone;
  static constexpr bool kIsBook = kTable > CodeTable::kE2m1;
  // True if each output has an fp32 factor, by which its whole sum is multiplied (NVFP4).
  static constexpr bool kHasFactor = kKind == Scales::kGroupE4m3;
  // True if the integer of a group's scale is stored in the bits above the group's signs.
  static constexpr bool kLevelsAside = kTable == CodeTable::kIq2Xxs || kTable == CodeTable::kIq3Xxs;
  // True if the upper bits of codebook indices, one index per four inputs, are stored apart.
  static constexpr bool kHasUpper = kTable == CodeTable::kIq2S || kTable == CodeTable::kIq3S;
  static constexpr bool kHasZeros = kKind == Scales::kGroupZero;
  static constexpr bool kHasMinimum = kKind == Scales::kGroupMinimum || kHasZeros;
  static constexpr bool kIsRow = kKind == Scales::kRow;
  static constexpr bool kIsSuper = kLevelBits != 0;
  // True if products of several rows unpack the weights first, into memory.
  static constexpr bool kKeepsUnpacked = kIsSuper || kHasTable || kHasZeros || kCodeBits == 5;
  // The code that stands for zero, before the scale is applied.
  static constexpr int32_t kCentre = kHasMinimum  ? 0
                                     : kHasFactor ? kE2m1Centre
                                     : kHasTable  ? 128
                                                  : 1 << (kCodeBits - 1);
  // The largest code that unpacking gives, and the number of steps whose products with such codes
  // are summed in 16 bits: a power of two within a group; 0: none.
  static constexpr int kMaxCode = kHasFactor                ? 2 * kE2m1Centre
                                  : kHasTable || kBits == 8 ? 255
                                                            : (1 << kBits) - 1;
  static constexpr int kNarrowSteps = count_narrow_steps(NarrowSums<kMaxCode>::kSteps, kGroupSize);
  // Number of inputs that are unpacked together (a chunk).
  static constexpr size_t kChunk =
      kIsBook ? kGroupSize : kBits == 8 ? 4 : kBits == 4 ? 8 : kBits == 5 ? 32 : 16;
  static constexpr size_t kChunkBytes =
      kPanelColumns * kChunk * kBits / 8 + (kHasUpper ? kPanelColumns * kChunk / 32 : 0);
  static constexpr size_t kHalfBytes = kIsRow       ? 0
                                       : kHasFactor ? kPanelColumns
                                       : kHasZeros  ? kScaleBytes + kPanelColumns / 2
                                                    : (kHasMinimum ? 2 : 1) * kScaleBytes;
  // Bytes at the beginning of a panel, before its first group.
  static constexpr size_t kPanelHeaderBytes = kIsRow ? kScaleBytes : kHasFactor ? kRowHeaderBytes : 0;
  // Sizes of a superblock: its groups, its integers of scales and minima (levels), and its bytes
  // before the codes.
  static constexpr size_t kGroups = kIsSuper ? kSuperblockSize / kGroupSize : 1;
  static constexpr size_t kLevels =
      kIsSuper && !kLevelsAside ? kGroups * (kHasMinimum ? 2 : 1) : 0;
  static constexpr size_t kHeaderBytes =
      kHalfBytes + kLevels * kPanelColumns * static_cast<size_t>(kLevelBits) / 8;
  static constexpr size_t kSuperBytes = kHeaderBytes + kSuperblockSize / kChunk * kChunkBytes;

  static constexpr size_t group_size(const WeightFormat& format) {
    if constexpr (kIsRow) return kRowGroupSize;
    if constexpr (kGroupSize != 0) return kGroupSize;
    return static_cast<size_t>(format.group_size);
  }
};

template <class Visit>
inline auto visit_two_bits(const WeightFormat& format, const Visit& visit) {
  switch (format.table) {
    case CodeTable::kIq2Xxs:
      return visit(IntFormat<2, Scales::kGroup, 4, 32, CodeTable::kIq2Xxs>{});
    case CodeTable::kIq2Xs: return visit(IntFormat<2, Scales::kGroup, 4, 16, CodeTable::kIq2Xs>{});
    case CodeTable::kIq2S: return visit(IntFormat<2, Scales::kGroup, 4, 16, CodeTable::kIq2S>{});
    default: return visit(IntFormat<2, Scales::kGroupMinimum, 4, 16>{});
  }
}

template <class Visit>
inline auto visit_three_bits(const WeightFormat& format, const Visit& visit) {
  switch (format.table) {
    case CodeTable::kIq3Xxs:
      return visit(IntFormat<3, Scales::kGroup, 4, 32, CodeTable::kIq3Xxs>{});
    case CodeTable::kIq3S: return visit(IntFormat<3, Scales::kGroup, 4, 32, CodeTable::kIq3S>{});
    default: return visit(IntFormat<3, Scales::kGroup, 6, 16>{});
  }
}

// Calls `visit` with the type of an integer format.
template <class Visit>
inline auto visit_int_format(const WeightFormat& format, const Visit& visit) {
  constexpr Scales kMinimum = Scales::kGroupMinimum, kPlain = Scales::kGroup;
  if (format.scale_bits != 0) {
    switch (format.bits) {
      case 2: return visit_two_bits(format, visit);
      case 3: return visit_three_bits(format, visit);
      case 4:
        return format.table != CodeTable::kNone
                   ? visit(IntFormat<4, kPlain, 6, 32, CodeTable::kIq4Nl>{})
                   : visit(IntFormat<4, kMinimum, 6, 32>{});
      case 5: return visit(IntFormat<5, kMinimum, 6, 32>{});
      default: return visit(IntFormat<6, kPlain, 8, 16>{});
    }
  }
  if (format.bits == 8) {
    if (format.group_size == 0) return visit(IntFormat<8, Scales::kRow>{});
    return format.has_minimum ? visit(IntFormat<8, kMinimum>{}) : visit(IntFormat<8, kPlain>{});
  }
  if (format.bits == 5)
    return format.has_minimum ? visit(IntFormat<5, kMinimum, 0, 32>{})
                              : visit(IntFormat<5, kPlain, 0, 32>{});
  if (format.table == CodeTable::kE2m1)
    return visit(IntFormat<4, Scales::kGroupE4m3, 0, 16, CodeTable::kE2m1>{});
  if (format.table != CodeTable::kNone)
    return visit(IntFormat<4, kPlain, 0, 32, CodeTable::kIq4Nl>{});
  if (format.has_zeros) return visit(IntFormat<4, Scales::kGroupZero>{});
  return format.has_minimum ? visit(IntFormat<4, kMinimum>{}) : visit(IntFormat<4, kPlain>{});
}

// The values of GGUF's table IQ4_NL plus 128, which makes them unsigned.
alignas(16) constexpr uint8_t kTableCodes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                 129, 141, 153, 166, 181, 197, 217, 241};
// Twice the values of e2m1's codes, plus kE2m1Centre, which makes them unsigned.
alignas(16) constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                12, 11, 10, 9,  8,  6,  4,  0};

// Returns the signs of four of eight inputs in the lowest bits. Seven signs are stored from bit
// kShift on; kIsSecond chooses the second four inputs.
template <int kShift, bool kIsSecond>
TANDEM_INLINE inline I32 complete_signs(I32 words) {
  const I32 seven = words >> kShift;
  if constexpr (!kIsSecond) {
    return seven;
  } else {
    // The eighth sign is not stored: it makes the number of negative signs even.
    const I32 masked = seven & 127;
    const I32 odd = (set_i32(0x6996) >> ((masked ^ (masked >> 4)) & 15)) & 1;
    return (masked >> 4) | (odd << 3);
  }
}

// Does the same as unpack_codes for a chunk of codebook indices and signs: inputs 4 kStep + i.
template <class Format, int kStep>
TANDEM_INLINE inline I32 unpack_entries(const uint8_t* chunk, size_t column) {
  constexpr CodeTable kTable = Format::kTable;
  constexpr int kEight = kStep / 2;
  constexpr bool kIsSecond = kStep % 2 != 0;
  const uint8_t* at = chunk + column * 4;
  if constexpr (kTable == CodeTable::kIq2Xxs) {
    const I32 signs = complete_signs<7 * kEight, kIsSecond>(load_i32(at + kStepBytes));
    const I32 index = (load_i32(at) >> (8 * kEight)) & 255;
    return negate_bytes(gather<2>(kIq2XxsBook + kIsSecond, index), signs);
  } else if constexpr (kTable == CodeTable::kIq2Xs) {
    const I32 words = load_i32(at);
    const I32 signs = complete_signs<16 * kEight + 9, kIsSecond>(words);
    const I32 index = (words >> (16 * kEight)) & 511;
    return negate_bytes(gather<2>(kIq2XsBook + kIsSecond, index), signs);
  } else if constexpr (kTable == CodeTable::kIq2S) {
    constexpr size_t kHalf = kPanelColumns / 2;
    const I32 low = (load_u16(chunk + column * 2) >> (8 * kEight)) & 255;
    const I32 upper = load_u8(chunk + 4 * kPanelColumns + column % kHalf) >>
                      (static_cast<int>(column / kHalf) * 4 + 2 * kEight);
    const I32 signs = load_u16(chunk + 2 * kPanelColumns + column * 2) >> (4 * kStep);
    return negate_bytes(gather<2>(kIq2SBook + kIsSecond, low | ((upper & 3) << 8)), signs);
  } else if constexpr (kTable == CodeTable::kIq3Xxs) {
    const I32 signs = complete_signs<7 * kEight, kIsSecond>(load_i32(at + 2 * kStepBytes));
    const I32 index = (load_i32(at + kStep / 4 * kStepBytes) >> (kStep % 4 * 8)) & 255;
    return negate_bytes(gather<1>(kIq3XxsBook, index), signs);
  } else {
    const I32 signs = load_i32(at + 2 * kStepBytes) >> (4 * kStep);
    const I32 low = (load_i32(at + kStep / 4 * kStepBytes) >> (kStep % 4 * 8)) & 255;
    const I32 upper = (load_u8(chunk + 3 * kStepBytes + column) >> kStep) & 1;
    return negate_bytes(gather<1>(kIq3SBook, low | (upper << 8)), signs);
  }
}

// Returns the codes of the inputs 4 kStep + i of a chunk, in byte i of each lane, for columns from
// `column` on.
template <class Format, int kStep>
TANDEM_INLINE inline I32 unpack_codes(const uint8_t* chunk, size_t column) {
  constexpr int kBits = Format::kBits;
  const uint8_t* at = chunk + column * 4;
  if constexpr (Format::kIsBook) {
    return unpack_entries<Format, kStep>(chunk, column);
  } else if constexpr (kBits == 8) {
    return load_i32(at);
  } else if constexpr (kBits == 4) {
    const I32 v = load_i32(at);
    const I32 codes = kStep == 0 ? low_nibbles(v) : high_nibbles(v);
    if constexpr (Format::kHasFactor)
      return look_up(kE2m1Codes, codes);
    else if constexpr (Format::kHasTable)
      return look_up(kTableCodes, codes);
    else
      return codes;
  } else if constexpr (kBits == 2) {
    return (load_i32(at) >> (2 * kStep)) & 0x03030303;
  } else if constexpr (kBits == 3) {
    const I32 half = load_u16(chunk + kStepBytes + column * 2);
    const I32 third = half | (half << 12);
    const I32 moved = kStep < 3 ? third << (kStep < 3 ? 2 - kStep : 0) : third >> 1;
    return ((load_i32(at) >> (2 * kStep)) & 0x03030303) | (moved & 0x04040404);
  } else {
    constexpr int kWidth = kBits - 4, kShift = 4 - kWidth * kStep;
    const I32 high = load_i32(at);
    const I32 v = load_i32(at + (1 + kStep / 2) * kStepBytes);
    const I32 moved = kShift >= 0 ? high << (kShift >= 0 ? kShift : 0)
                                  : high >> (kShift >= 0 ? 0 : -kShift);
    return (kStep % 2 == 0 ? low_nibbles(v) : high_nibbles(v)) |
           (moved & (kWidth == 1 ? 0x10101010 : 0x30303030));
  }
}

// Reads the scales and minima of a panel's groups, from the first group to the last.
template <class Format>
class GroupScales {
 public:
  // Begins a group. `p` points to the group with its header; returns a pointer to its codes.
  TANDEM_INLINE inline const uint8_t* enter(const uint8_t* p, size_t group) {
    if constexpr (Format::kIsSuper) {
      group_ = group % Format::kGroups;
      if (group_ != 0) return p;
      unpack_levels(p + Format::kHalfBytes);
      widen_halves(reinterpret_cast<const uint16_t*>(p));
      codes_ = p + Format::kHeaderBytes;
    }
    halves_ = reinterpret_cast<const uint16_t*>(p);
    return p + Format::kHeaderBytes;
  }
  // Chooses a group of the superblock that `enter` has read.
  TANDEM_INLINE inline void choose(size_t group) { group_ = group % Format::kGroups; }

  TANDEM_INLINE inline F32 scale(size_t column) const {
    if constexpr (Format::kIsRow) {
      return set_f32(1.0f);
    } else if constexpr (Format::kHasFactor) {
      // Half of the scale is returned, because codes are those of doubled numbers. Shifted to
      // fp32's exponent, an e4m3 number is too small by 2^120; scales have no sign.
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(halves_);
      return as_f32(load_u8(bytes + column) << 20) * set_f32(0x1p119f);
    } else if constexpr (Format::kIsBook) {
      const I32 level = load_level(column);
      return to_f32(level + level + 1) * load_f32(steps_ + column);
    } else if constexpr (Format::kIsSuper) {
      I32 level = load_u8(levels_ + group_ * kPanelColumns + column);
      if constexpr (!Format::kHasMinimum) level = level - set_i32(1 << (Format::kScaleBits - 1));
      return to_f32(level) * load_f32(steps_ + column);
    } else {
      return load_fp16(halves_ + column);
    }
  }
  // Returns the minima of a group. A format without minima returns -0, which changes no sum, not
  // even the sign of a zero.
  TANDEM_INLINE inline F32 minimum(size_t column) const {
    if constexpr (!Format::kHasMinimum) {
      return set_f32(-0.0f);
    } else if constexpr (Format::kIsSuper) {
      const size_t at = (Format::kGroups + group_) * kPanelColumns + column;
      return to_f32(load_u8(levels_ + at)) * load_f32(steps_ + kPanelColumns + column);
    } else if constexpr (Format::kHasZeros) {
      constexpr size_t kHalf = kPanelColumns / 2;
      const uint8_t* nibbles = reinterpret_cast<const uint8_t*>(halves_ + kPanelColumns);
      const I32 pairs = load_u8(nibbles + column % kHalf);
      const I32 zero = (pairs >> (static_cast<int>(column / kHalf) * 4)) & 15;
      return to_f32(zero) * (load_fp16(halves_ + column) * set_f32(-1.0f));
    } else {
      return load_fp16(halves_ + kPanelColumns + column);
    }
  }

 private:
  // Returns the integers (levels) of a group's scales; in formats that store them above the signs,
  // from the last words of the chunk.
  TANDEM_INLINE inline I32 load_level(size_t column) const {
    if constexpr (!Format::kLevelsAside) {
      return load_u8(levels_ + group_ * kPanelColumns + column);
    } else {
      const uint8_t* chunk = codes_ + group_ * Format::kChunkBytes;
      return (load_i32(chunk + Format::kChunkBytes - kStepBytes + column * 4) >> 28) & 15;
    }
  }

  // Widens the fp16 numbers of a superblock to the form that the products of groups need: those of
  // minima negated, and those of codebooks times the fraction that a level stands for.
  TANDEM_INLINE inline void widen_halves(const uint16_t* halves) {
    constexpr float kPart = !Format::kIsBook                         ? 1.0f
                            : Format::kTable == CodeTable::kIq3S   ? 1.0f
                            : Format::kTable == CodeTable::kIq3Xxs ? 0.25f
                                                                   : 0.125f;
    for (size_t c = 0; c < kPanelColumns; c += kLanes) {
      store_f32(steps_ + c, load_fp16(halves + c) * set_f32(kPart));
      if constexpr (Format::kHasMinimum)
        store_f32(steps_ + kPanelColumns + c,
                  load_fp16(halves + kPanelColumns + c) * set_f32(-1.0f));
    }
  }

  void unpack_levels(const uint8_t* rows) {
    constexpr size_t kCount = Format::kLevels;
    constexpr size_t kBytes = kLanes * 4;
    if constexpr (kCount == 0) {
      levels_ = nullptr;
    } else if constexpr (Format::kScaleBits == 8) {
      levels_ = rows;
    } else {
      levels_ = unpacked_;
      const uint8_t* upper = rows + kCount / 2 * kPanelColumns;
      for (size_t r = 0; r < kCount / 2; ++r) {
        for (size_t c = 0; c < kPanelColumns; c += kBytes) {
          const I32 v = load_i32(rows + r * kPanelColumns + c);
          I32 low = low_nibbles(v), high = high_nibbles(v);
          if constexpr (Format::kScaleBits == 6) {
            // Levels r and r + kCount / 2 have their upper bits in the same byte.
            constexpr size_t kRows = kCount / 4;
            const I32 bits = load_i32(upper + r % kRows * kPanelColumns + c);
            const I32 first = r < kRows ? bits << 4 : bits << 2;
            const I32 second = r < kRows ? bits : bits >> 2;
            low = low | (first & 0x30303030);
            high = high | (second & 0x30303030);
          }
          store_i32(unpacked_ + r * kPanelColumns + c, low);
          store_i32(unpacked_ + (r + kCount / 2) * kPanelColumns + c, high);
        }
      }
    }
  }

  const uint16_t* halves_ = nullptr;
  const uint8_t* levels_ = nullptr;
  const uint8_t* codes_ = nullptr;  // The superblock's first code.
  size_t group_ = 0;
  alignas(64) float steps_[Format::kIsSuper ? 2 * kPanelColumns : 1] = {};
  static constexpr bool kIsUnpacked = Format::kLevels != 0 && Format::kScaleBits != 8;
  alignas(64) uint8_t unpacked_[kIsUnpacked ? Format::kLevels * kPanelColumns : 1];
};

// Returns the beginning of the group that has input k of a panel; in a format with superblocks,
// that of the superblock.
template <class Format>
inline const uint8_t* find_group(const WeightFormat& format, const uint8_t* panel, size_t k) {
  if constexpr (Format::kIsSuper) return panel + k / kSuperblockSize * Format::kSuperBytes;
  const size_t size = Format::group_size(format);
  const size_t bytes = Format::kHeaderBytes + size / Format::kChunk * Format::kChunkBytes;
  return panel + Format::kPanelHeaderBytes + k / size * bytes;
}
