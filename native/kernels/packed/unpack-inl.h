// Integer formats: how their codes are unpacked and their scales applied. A format is one type here,
// which the products of multiply-inl.h and multiply_tiles-inl.h and the gradients of backward-inl.h
// share. Included by multiply-inl.h; weight_format.h says where what lies.

// The numbers beside codes, in fp16 or made of a superblock's.
enum class Scales { kGroup, kGroupMinimum, kRow };

constexpr size_t kScaleBytes = kPanelColumns * 2;

// kGroupSize 0: the format's own, known at run time.
template <int kCodeBits, Scales kKind, int kLevelBits = 0, int kGroupSize = 0, bool kTable = false>
struct IntFormat {
  static constexpr int kBits = kCodeBits;
  static constexpr Scales kScales = kKind;
  static constexpr int kScaleBits = kLevelBits;
  static constexpr bool kHasTable = kTable;
  static constexpr bool kHasMinimum = kKind == Scales::kGroupMinimum;
  static constexpr bool kIsRow = kKind == Scales::kRow;
  static constexpr bool kIsSuper = kLevelBits != 0;
  // True if products of several rows unpack the weights first, into memory.
  static constexpr bool kKeepsUnpacked = kIsSuper || kTable || kCodeBits == 5;
  // The value of code 0, before the scale.
  static constexpr int32_t kCentre = kHasMinimum ? 0 : kTable ? 128 : 1 << (kCodeBits - 1);
  // Inputs that are unpacked together.
  static constexpr size_t kChunk = kBits == 8 ? 4 : kBits == 4 ? 8 : kBits == 5 ? 32 : 16;
  static constexpr size_t kChunkBytes = kPanelColumns * kChunk * kBits / 8;
  static constexpr size_t kHalfBytes = kIsRow ? 0 : (kHasMinimum ? 2 : 1) * kScaleBytes;
  // Of a superblock: groups, integers of scales and minima, and bytes before the codes.
  static constexpr size_t kGroups = kIsSuper ? kSuperblockSize / kGroupSize : 1;
  static constexpr size_t kLevels = kIsSuper ? kGroups * (kHasMinimum ? 2 : 1) : 0;
  static constexpr size_t kHeaderBytes =
      kHalfBytes + kLevels * kPanelColumns * static_cast<size_t>(kLevelBits) / 8;
  static constexpr size_t kSuperBytes = kHeaderBytes + kPanelColumns * kSuperblockSize * kBits / 8;

  static constexpr size_t group_size(const WeightFormat& format) {
    if constexpr (kIsRow) return kRowGroupSize;
    if constexpr (kGroupSize != 0) return kGroupSize;
    return static_cast<size_t>(format.group_size);
  }
};

// Calls `visit` with the type of an integer format.
template <class Visit>
inline auto visit_int_format(const WeightFormat& format, const Visit& visit) {
  constexpr Scales kMinimum = Scales::kGroupMinimum, kPlain = Scales::kGroup;
  if (format.scale_bits != 0) {
    switch (format.bits) {
      case 2: return visit(IntFormat<2, kMinimum, 4, 16>{});
      case 3: return visit(IntFormat<3, kPlain, 6, 16>{});
      case 4:
        return format.has_table ? visit(IntFormat<4, kPlain, 6, 32, true>{})
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
  if (format.has_table) return visit(IntFormat<4, kPlain, 0, 32, true>{});
  return format.has_minimum ? visit(IntFormat<4, kMinimum>{}) : visit(IntFormat<4, kPlain>{});
}

// IQ4_NL's values plus 128, so that they are unsigned.
alignas(16) constexpr uint8_t kTableCodes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                 129, 141, 153, 166, 181, 197, 217, 241};

// Codes of the inputs 4 kStep + i of a chunk, byte i of each lane, of columns from `column` on.
template <class Format, int kStep>
TANDEM_INLINE inline I32 unpack_codes(const uint8_t* chunk, size_t column) {
  constexpr int kBits = Format::kBits;
  const uint8_t* at = chunk + column * 4;
  if constexpr (kBits == 8) {
    return load_i32(at);
  } else if constexpr (kBits == 4) {
    const I32 v = load_i32(at);
    const I32 codes = kStep == 0 ? low_nibbles(v) : high_nibbles(v);
    if constexpr (Format::kHasTable)
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

// Scales and minima of the groups of a panel, front to back.
template <class Format>
class GroupScales {
 public:
  // `p` is where a group begins, with all that stands before it; returns its codes.
  TANDEM_INLINE inline const uint8_t* enter(const uint8_t* p, size_t group) {
    if constexpr (Format::kIsSuper) {
      group_ = group % Format::kGroups;
      if (group_ != 0) return p;
      unpack_levels(p + Format::kHalfBytes);
    }
    halves_ = reinterpret_cast<const uint16_t*>(p);
    return p + Format::kHeaderBytes;
  }
  // The same, where the superblock is entered already.
  TANDEM_INLINE inline void choose(size_t group) { group_ = group % Format::kGroups; }

  TANDEM_INLINE inline F32 scale(size_t column) const {
    if constexpr (Format::kIsRow) {
      return set_f32(1.0f);
    } else if constexpr (Format::kIsSuper) {
      I32 level = load_u8(levels_ + group_ * kPanelColumns + column);
      if constexpr (!Format::kHasMinimum) level = level - set_i32(1 << (Format::kScaleBits - 1));
      return to_f32(level) * load_fp16(halves_ + column);
    } else {
      return load_fp16(halves_ + column);
    }
  }
  // Without minima one that adds nothing, not even a sign to zero.
  TANDEM_INLINE inline F32 minimum(size_t column) const {
    if constexpr (!Format::kHasMinimum) {
      return set_f32(-0.0f);
    } else if constexpr (Format::kIsSuper) {
      const F32 step = load_fp16(halves_ + kPanelColumns + column) * set_f32(-1.0f);
      const size_t at = (Format::kGroups + group_) * kPanelColumns + column;
      return to_f32(load_u8(levels_ + at)) * step;
    } else {
      return load_fp16(halves_ + kPanelColumns + column);
    }
  }

 private:
  void unpack_levels(const uint8_t* rows) {
    constexpr size_t kCount = Format::kLevels;
    constexpr size_t kBytes = kLanes * 4;
    if constexpr (Format::kScaleBits == 8) {
      levels_ = rows;
    } else {
      levels_ = unpacked_;
      const uint8_t* upper = rows + kCount / 2 * kPanelColumns;
      for (size_t r = 0; r < kCount / 2; ++r) {
        for (size_t c = 0; c < kPanelColumns; c += kBytes) {
          const I32 v = load_i32(rows + r * kPanelColumns + c);
          I32 low = low_nibbles(v), high = high_nibbles(v);
          if constexpr (Format::kScaleBits == 6) {
            // Integers r and r + kCount / 2 share a byte of upper bits.
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
  size_t group_ = 0;
  static constexpr bool kIsUnpacked = Format::kIsSuper && Format::kScaleBits != 8;
  alignas(64) uint8_t unpacked_[kIsUnpacked ? Format::kLevels * kPanelColumns : 1];
};

// Where the group of input k begins that a panel's products reach after those before it: of a format
// in superblocks, its superblock.
template <class Format>
inline const uint8_t* find_group(const WeightFormat& format, const uint8_t* panel, size_t k) {
  if constexpr (Format::kIsSuper) return panel + k / kSuperblockSize * Format::kSuperBytes;
  const size_t size = Format::group_size(format);
  const size_t bytes = Format::kHeaderBytes + kPanelColumns * size * Format::kBits / 8;
  return panel + (Format::kIsRow ? kScaleBytes : 0) + k / size * bytes;
}
