// Codebook entries taken eight inputs at a time, for variants with TANDEM_EIGHTS_HEADER: beside one row
// they are multiplied, for several they are unpacked. Other variants take four inputs at a time, by
// unpack_entries. Included by multiply-inl.h.

template <class Format>
constexpr int entry_words() {
  return Format::kTable == CodeTable::kIq3Xxs || Format::kTable == CodeTable::kIq3S ? 1 : 2;
}
template <class Format>
constexpr int max_magnitude() {
  if (Format::kTable == CodeTable::kIq3S) return 15;
  return Format::kTable == CodeTable::kIq3Xxs ? 62 : 43;
}
template <class Format>
inline const uint32_t* find_book() {
  switch (Format::kTable) {
    case CodeTable::kIq2Xxs: return kIq2XxsBook;
    case CodeTable::kIq2Xs: return kIq2XsBook;
    case CodeTable::kIq2S: return kIq2SBook;
    case CodeTable::kIq3Xxs: return kIq3XxsBook;
    default: return kIq3SBook;
  }
}

// The indices and signs of a chunk for kLanes columns.
template <class Format>
class ChunkEntries {
 public:
  // True if indices are put together here; otherwise they are read from the panel.
  static constexpr bool kStoresIndices = Format::kHasUpper;

  TANDEM_INLINE inline void read(const uint8_t* chunk, size_t column) {
    words_ = chunk + column * 4;
    if constexpr (Format::kLevelsAside) {
      signs_ = complete_bytes(spread_sevens(load_i32(words_ + Format::kChunkBytes - kStepBytes)));
    } else if constexpr (kTable == CodeTable::kIq2Xs) {
      signs_ = complete_bytes(shift_u16<9>(load_i32(words_)));
    } else if constexpr (kTable == CodeTable::kIq2S) {
      constexpr size_t kHalfPanel = kPanelColumns / 2;
      const I32 low = load_u16(chunk + column * 2);
      const I32 upper = load_u8(chunk + 4 * kPanelColumns + column % kHalfPanel) >>
                        static_cast<int>(column / kHalfPanel * 4);
      // Two lower bytes and the two upper bits of each become two indices of 16 bits.
      store_i32(indices_, (low & 0xff) | ((low << 8) & 0xff0000) | ((upper << 8) & 0x300) |
                              ((upper << 22) & 0x3000000));
      signs_ = load_u16(chunk + 2 * kPanelColumns + column * 2);
    } else {
      const I32 upper = load_u8(chunk + 3 * kStepBytes + column);
      store_pairs(indices_, load_i32(words_), spread_bits<0>(upper));
      store_pairs(indices_ + 32, load_i32(words_ + kStepBytes), spread_bits<4>(upper));
      signs_ = load_i32(words_ + 2 * kStepBytes);
    }
  }

  // Returns magnitudes plus 128 of the inputs 8 kEight + i, for the columns kEightsColumns[kHalf].
  template <int kEight, int kHalf>
  TANDEM_INLINE inline I32 load(const uint32_t* book) const {
    return load_entries<kHalf, entry_words<Format>()>(book, [&](int column, int i) TANDEM_INLINE {
      // Entry `entry` of the four of a column that lie together, in run kRun.
      constexpr int kRun = entry_words<Format>() == 1 ? kEight / 2 : 0;
      const int entry = entry_words<Format>() == 1 ? kEight % 2 * 2 + i : kEight;
      if constexpr (Format::kLevelsAside) {
        return size_t{words_[static_cast<size_t>(kRun) * kStepBytes +
                             static_cast<size_t>(4 * column + entry)]};
      } else if constexpr (kTable == CodeTable::kIq2Xs) {
        uint16_t word;
        __builtin_memcpy(&word, words_ + 4 * column + 2 * entry, sizeof word);
        return size_t{word & 511u};
      } else if constexpr (kTable == CodeTable::kIq2S) {
        return size_t{indices_[2 * column + entry]};
      } else {
        return size_t{indices_[32 * kRun + place_pairs(column) + entry]};
      }
    });
  }
  // Returns the signs of the same inputs.
  template <int kEight, int kHalf>
  TANDEM_INLINE inline auto signs() const {
    return spread_signs<kHalf, kTable == CodeTable::kIq2Xs ? 2 * kEight : kEight>(signs_);
  }

 private:
  static constexpr CodeTable kTable = Format::kTable;
  I32 signs_;
  const uint8_t* words_;
  alignas(32) uint16_t indices_[!kStoresIndices ? 1 : kTable == CodeTable::kIq3S ? 64 : 16];
};

// Calls `use(v, entries)` for kVectors vectors of columns from `column` on.
template <class Format, size_t kVectors, class Use>
TANDEM_INLINE inline void visit_entries(const uint8_t* chunk, size_t column, const Use& use) {
  if constexpr (ChunkEntries<Format>::kStoresIndices) {
    // All are stored before one is loaded: what is loaded soon after a wider store waits for it.
    ChunkEntries<Format> entries[kVectors];
    for (size_t v = 0; v < kVectors; ++v) entries[v].read(chunk, column + v * kLanes);
    for (size_t v = 0; v < kVectors; ++v) use(v, entries[v]);
  } else {
    for (size_t v = 0; v < kVectors; ++v) {
      ChunkEntries<Format> entries;
      entries.read(chunk, column + v * kLanes);
      use(v, entries);
    }
  }
}

// Adds the integer products of a chunk, which is a group, to `acc`. The row's codes take over the signs:
// magnitudes are the unsigned operand then, their products fit 16 bits, and sums need no correction.
template <class Format, int kVectors>
TANDEM_INLINE inline void add_entries(I32 (&acc)[kVectors], const uint8_t* a, const uint8_t* chunk,
                                      size_t column) {
  static_assert(kVectors == kPanelVectors);
  constexpr int kEights = static_cast<int>(Format::kChunk / 8);
  // Number of eights whose products are summed in 16 bits.
  constexpr int kMost = 32767 / (256 * max_magnitude<Format>());
  constexpr int kSummed = kMost < kEights ? 2 : kEights;
  static_assert(kMost >= 2 && kEights % kSummed == 0);
  for (size_t i = 0; i < Format::kChunkBytes; i += 64)
    __builtin_prefetch(chunk + kPrefetchBytes + i);
  const uint32_t* book = find_book<Format>();
  I32 row[kEights];
  unroll<kEights>([&](auto e) TANDEM_INLINE { row[e.value] = load_eight(a + 8 * e.value); });
  visit_entries<Format, kVectors>(chunk, column, [&](size_t v, const auto& entries) TANDEM_INLINE {
    I32 sums[2];
    unroll<2>([&](auto half) TANDEM_INLINE {
      constexpr int kHalf = decltype(half)::value;
      I32 narrow{};
      unroll<kEights>([&](auto e) TANDEM_INLINE {
        constexpr int kEight = decltype(e)::value;
        const I32 magnitudes = entries.template load<kEight, kHalf>(book) & 0x7f7f7f7f;
        const I32 products = multiply_eights(
            magnitudes, sign_eights(row[kEight], entries.template signs<kEight, kHalf>()));
        narrow = kEight % kSummed == 0 ? products : add_u16(narrow, products);
        if constexpr (kEight % kSummed == kSummed - 1)
          sums[kHalf] = kEight < kSummed ? widen_pairs(narrow) : sums[kHalf] + widen_pairs(narrow);
      });
    });
    acc[v] += pick_words<0>(sums[0], sums[1]) + pick_words<1>(sums[0], sums[1]);
  });
}

// Unpacks a chunk to codes of eight bits, as unpack_codes does for each step.
template <class Format>
TANDEM_INLINE inline void unpack_chunk(const uint8_t* chunk, uint8_t* to) {
  const uint32_t* book = find_book<Format>();
  visit_entries<Format, kPanelVectors>(chunk, 0, [&](size_t v, const auto& entries) TANDEM_INLINE {
    unroll<Format::kChunk / 8>([&](auto e) TANDEM_INLINE {
      constexpr int kEight = decltype(e)::value;
      const I32 first = negate_eights(entries.template load<kEight, 0>(book),
                                      entries.template signs<kEight, 0>());
      const I32 second = negate_eights(entries.template load<kEight, 1>(book),
                                       entries.template signs<kEight, 1>());
      uint8_t* at = to + 2 * kEight * kStepBytes + v * kLanes * 4;
      store_i32(at, pick_words<0>(first, second));
      store_i32(at + kStepBytes, pick_words<1>(first, second));
    });
  });
}
