#include "kernels/weights/codebooks/codebook_blocks.h"

#include <cstring>

#include "kernels/weights/codebooks/codebooks.h"

namespace tandem {
namespace {

constexpr size_t kEights = kSuperblockSize / 8;
constexpr size_t kBookStepBytes = kPanelColumns * 4;

template <class T>
T read_as(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Eight weights: magnitudes from the codebook, four in a word, and one sign bit for each.
struct Eight {
  uint32_t words[2];
  uint32_t signs;
};

// Returns eight sign bits: seven are stored, and the eighth makes the number of negative signs
// even.
uint32_t complete_signs(uint32_t seven) {
  const uint32_t folded = seven ^ seven >> 4;
  return seven | (0x6996u >> (folded & 15) & 1) << 7;
}

// Loads the word that IQ2_XXS and IQ3_XXS store for each 32 weights: four times seven signs, and
// the integer of the group's scale.
uint32_t load_aside(BlockKind kind, const uint8_t* block, size_t group) {
  return read_as<uint32_t>(kind == BlockKind::kIq2Xxs ? block + 2 + 8 * group + 4
                                                   : block + 66 + 4 * group);
}

Eight read_eight(BlockKind kind, const uint8_t* block, size_t i) {
  const auto pair = [](const uint32_t* book, size_t entry, uint32_t signs) {
    return Eight{{book[2 * entry], book[2 * entry + 1]}, signs};
  };
  const size_t group = i / 4, part = i % 4;
  switch (kind) {
    case BlockKind::kIq2Xxs:
      return pair(kIq2XxsBook, block[2 + 8 * group + part],
                  complete_signs(load_aside(kind, block, group) >> (7 * part) & 127));
    case BlockKind::kIq2Xs: {
      const auto code = read_as<uint16_t>(block + 2 + 2 * i);
      return pair(kIq2XsBook, code & 511u, complete_signs(code >> 9));
    }
    case BlockKind::kIq2S: {
      const size_t high = block[66 + group] >> (2 * part) & 3;
      return pair(kIq2SBook, block[2 + i] | high << 8, block[34 + i]);
    }
    case BlockKind::kIq3Xxs:
      return {{kIq3XxsBook[block[2 + 2 * i]], kIq3XxsBook[block[2 + 2 * i + 1]]},
              complete_signs(load_aside(kind, block, group) >> (7 * part) & 127)};
    default: {
      const uint32_t high = uint32_t{block[66 + group]} >> (2 * part);
      return {{kIq3SBook[block[2 + 2 * i] | (high & 1) << 8],
               kIq3SBook[block[2 + 2 * i + 1] | (high >> 1 & 1) << 8]},
              block[74 + i]};
    }
  }
}

uint8_t read_level(BlockKind kind, const uint8_t* block, size_t group) {
  if (kind == BlockKind::kIq2Xxs || kind == BlockKind::kIq3Xxs)
    return static_cast<uint8_t>(load_aside(kind, block, group) >> 28);
  const size_t begin = kind == BlockKind::kIq2Xs ? 66 : kind == BlockKind::kIq2S ? 74 : 106;
  return block[begin + group / 2] >> (4 * (group % 2)) & 15;
}

}  // namespace

bool is_codebook_kind(BlockKind kind) {
  return block_type(kind).format.table > CodeTable::kE2m1;
}

std::vector<uint8_t> list_codebook(BlockKind kind) {
  const uint32_t* words = nullptr;
  size_t count = 0;
  switch (block_type(kind).format.table) {
    case CodeTable::kIq2Xxs: words = kIq2XxsBook, count = 2 * 256; break;
    case CodeTable::kIq2Xs: words = kIq2XsBook, count = 2 * 512; break;
    case CodeTable::kIq2S: words = kIq2SBook, count = 2 * 1024; break;
    case CodeTable::kIq3Xxs: words = kIq3XxsBook, count = 256; break;
    case CodeTable::kIq3S: words = kIq3SBook, count = 512; break;
    default: return {};
  }
  std::vector<uint8_t> book(count * 4);
  std::memcpy(book.data(), words, book.size());
  return book;
}

void split_codebook_block(BlockKind kind, const uint8_t* block, BlockCodes* out) {
  out->halves[0] = read_as<uint16_t>(block);
  const size_t groups = kSuperblockSize / block_type(kind).group_size;
  for (size_t g = 0; g < groups; ++g) out->levels[g] = read_level(kind, block, g);
  for (size_t i = 0; i < kEights; ++i) {
    const Eight eight = read_eight(kind, block, i);
    for (size_t k = 0; k < 8; ++k) {
      const auto code = static_cast<uint8_t>(eight.words[k / 4] >> (8 * (k % 4)));
      // Negate the byte: 128 - m is the opposite of 128 + m in eight bits.
      out->codes[8 * i + k] = static_cast<uint8_t>(eight.signs >> k & 1 ? -code : code);
    }
  }
}

float codebook_scale(BlockKind kind, float d, uint8_t level) {
  const float odd = static_cast<float>(2 * level + 1);
  if (kind == BlockKind::kIq3S) return d * odd;
  return d * (kind == BlockKind::kIq3Xxs ? 0.25f : 0.125f) * odd;
}

void place_codebook_block(BlockKind kind, const uint8_t* block, size_t column, uint8_t* to) {
  const auto put = [&](size_t at, const uint8_t* from, size_t size) {
    std::memcpy(to + at + column * size, from, size);
  };
  switch (kind) {
    case BlockKind::kIq2Xxs:
    case BlockKind::kIq2Xs:
      for (size_t i = 0; i < 16; ++i) put(i * kBookStepBytes, block + 2 + 4 * i, 4);
      return;
    case BlockKind::kIq2S:
      for (size_t i = 0; i < 16; ++i, to += 4 * kPanelColumns + kPanelColumns / 2) {
        put(0, block + 2 + 2 * i, 2);
        put(2 * kPanelColumns, block + 34 + 2 * i, 2);
        // Two columns share a byte, with four upper bits for each.
        const auto high = static_cast<uint8_t>(block[66 + i / 2] >> (4 * (i % 2)) & 15);
        uint8_t& shared = to[4 * kPanelColumns + column % (kPanelColumns / 2)];
        if (column < kPanelColumns / 2)
          shared = static_cast<uint8_t>((shared & 0xf0) | high);
        else
          shared = static_cast<uint8_t>((shared & 0x0f) | high << 4);
      }
      return;
    case BlockKind::kIq3Xxs:
      for (size_t i = 0; i < 8; ++i, to += 3 * kBookStepBytes) {
        put(0, block + 2 + 8 * i, 4);
        put(kBookStepBytes, block + 2 + 8 * i + 4, 4);
        put(2 * kBookStepBytes, block + 66 + 4 * i, 4);
      }
      return;
    default:
      for (size_t i = 0; i < 8; ++i, to += 3 * kBookStepBytes + kPanelColumns) {
        put(0, block + 2 + 8 * i, 4);
        put(kBookStepBytes, block + 2 + 8 * i + 4, 4);
        put(2 * kBookStepBytes, block + 74 + 4 * i, 4);
        put(3 * kBookStepBytes, block + 66 + i, 1);
      }
      return;
  }
}

}  // namespace tandem
