// Goal: blocks of a file are read and laid out within their bytes, whatever these are.
//
// Method: random blocks of every kind in memory of exactly their size, for the sanitizers to watch,
// in every format that holds them, whole and beginning within a block; values of one kind that are
// known. What they mean is tested against numpy and the gguf package, in tests/models.
#include "kernels/weights/stored_blocks.h"

#include <cstdint>
#include <vector>

#include "base/test.h"
#include "kernels/weights/packing.h"

namespace tandem {
namespace {

constexpr BlockKind kKinds[] = {BlockKind::kQ4_0, BlockKind::kQ4_1, BlockKind::kQ4K,
                                BlockKind::kQ5_0, BlockKind::kQ5_1, BlockKind::kQ5K,
                                BlockKind::kQ6K,  BlockKind::kQ8_0, BlockKind::kIq4Nl,
                                BlockKind::kMxfp4};
constexpr WeightFormat kFormats[] = {{4, 32, true},       {4, 32, false},  {8, 32, false},
                                     {8, 32, true},       {8, 16, false},  {8, 16, true},
                                     {4, 32, false, true}, {8, 128, false}};

std::vector<uint8_t> draw_bytes(size_t size, uint32_t seed) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((seed = seed * 1664525 + 1013904223) >> 24);
  return bytes;
}

void check_kind(const BlockType& type, uint32_t seed) {
  constexpr size_t kInputs = 512, kOutputs = 70;
  const size_t row_bytes = kInputs / type.weights * type.bytes;
  // Each row in memory of its own.
  std::vector<std::vector<uint8_t>> memory;
  std::vector<BlockRow> rows;
  for (size_t i = 0; i < kOutputs; ++i) {
    memory.push_back(draw_bytes(row_bytes, seed + static_cast<uint32_t>(i)));
    rows.push_back({memory.back().data(), type.kind});
  }
  std::vector<float> values(kOutputs * kInputs);
  CHECK(decode_blocks(nullptr, rows.data(), kOutputs, kInputs, values.data(), false).is_ok());
  std::vector<uint16_t> halves(kOutputs * kInputs);
  CHECK(decode_blocks(nullptr, rows.data(), kOutputs, kInputs, halves.data(), true).is_ok());
  MatrixView matrix;
  matrix.rows = kOutputs;
  matrix.columns = kInputs;
  matrix.block_rows = rows.data();
  size_t num_formats = 0;
  for (const WeightFormat& format : kFormats) {
    if (!holds_blocks(format, type.kind)) continue;
    ++num_formats;
    for (const size_t first_k : {size_t{0}, size_t{64}}) {
      for (const size_t last_k : {size_t{192}, kInputs}) {
        std::vector<uint8_t> panel(panel_bytes(format, last_k - first_k));
        for (const size_t row : {size_t{0}, kPanelColumns})
          // Random scales may be refused, with a reason.
          (void)lay_out_blocks(format, {&matrix, row, first_k, last_k}, panel.data());
      }
    }
  }
  CHECK(num_formats > 0);
}

TEST(blocks_of_every_kind_are_read_within_their_bytes) {
  for (uint32_t seed = 1; seed < 4; ++seed)
    for (const BlockKind kind : kKinds) check_kind(block_type(kind), seed);
}

TEST(names_of_kinds_are_found) {
  for (const BlockKind kind : kKinds) {
    CHECK(block_type(kind).kind == kind);
    CHECK(find_block_kind(block_type(kind).name).value() == kind);
  }
  CHECK(!find_block_kind("Q2_K").is_ok());
}

TEST(a_block_of_q8_0_is_its_scale_times_its_codes) {
  std::vector<uint8_t> block(34);
  block[1] = 0x38;  // 0.5
  for (size_t i = 0; i < 32; ++i) block[2 + i] = static_cast<uint8_t>(static_cast<int>(i) - 16);
  const BlockRow row = {block.data(), BlockKind::kQ8_0};
  float values[32];
  CHECK(decode_blocks(nullptr, &row, 1, 32, values, false).is_ok());
  for (size_t i = 0; i < 32; ++i)
    CHECK(values[i] == 0.5f * static_cast<float>(static_cast<int>(i) - 16));
}

}  // namespace
}  // namespace tandem
