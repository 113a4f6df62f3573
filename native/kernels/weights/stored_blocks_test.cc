// Goal: blocks of a file are read and laid out within their bytes, whatever these are.
//
// Method: random and extreme blocks of every kind in memory of exactly their size, for the sanitizers
// to watch, in every format that holds them, whole and beginning within a block, in sizes that fill
// no panel and no chunk; values of one kind that are known. What they mean is tested against numpy and the gguf package, in tests/models.
#include "kernels/weights/stored_blocks.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "base/test.h"
#include "kernels/linear/linear.h"
#include "kernels/vectors/test_isas.h"
#include "kernels/weights/packing.h"

namespace tandem {
namespace {

constexpr BlockKind kKinds[] = {BlockKind::kQ4_0, BlockKind::kQ4_1, BlockKind::kQ4K,
                                BlockKind::kQ5_0, BlockKind::kQ5_1, BlockKind::kQ5K,
                                BlockKind::kQ6K,  BlockKind::kQ8_0, BlockKind::kIq4Nl,
                                BlockKind::kQ2K,  BlockKind::kQ3K,  BlockKind::kIq4Xs,
                                BlockKind::kMxfp4, BlockKind::kIq2Xxs, BlockKind::kIq2Xs,
                                BlockKind::kIq2S, BlockKind::kIq3Xxs, BlockKind::kIq3S};
constexpr WeightFormat kFormats[] = {{4, 32, true},
                                     {4, 32, false},
                                     {5, 32, true},
                                     {5, 32, false},
                                     {8, 32, false},
                                     {8, 32, true},
                                     {8, 16, false},
                                     {8, 16, true},
                                     {4, 32, false, true},
                                     {8, 128, false},
                                     {2, 16, true, false, 4},
                                     {3, 16, false, false, 6},
                                     {4, 32, true, false, 6},
                                     {5, 32, true, false, 6},
                                     {6, 16, false, false, 8},
                                     {4, 32, false, false, 0, CodeTable::kIq4Nl},
                                     {4, 32, false, false, 6, CodeTable::kIq4Nl},
                                     {2, 32, false, false, 4, CodeTable::kIq2Xxs},
                                     {2, 16, false, false, 4, CodeTable::kIq2Xs},
                                     {2, 16, false, false, 4, CodeTable::kIq2S},
                                     {3, 32, false, false, 4, CodeTable::kIq3Xxs},
                                     {3, 32, false, false, 4, CodeTable::kIq3S}};

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
    const size_t span = span_size(format) < 64 ? 64 : span_size(format);
    for (const size_t first_k : {size_t{0}, span}) {
      for (const size_t last_k : {2 * span, kInputs}) {
        if (last_k <= first_k) continue;
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

// Rows, each in memory of its own, which ends where their blocks end.
struct StoredRows {
  std::vector<std::unique_ptr<uint8_t[]>> memory;
  std::vector<BlockRow> rows;

  void add(const BlockType& type, size_t columns, const std::vector<uint8_t>& bytes) {
    const size_t size = columns / type.weights * type.bytes;
    memory.push_back(std::make_unique<uint8_t[]>(size));
    for (size_t i = 0; i < size; ++i) memory.back()[i] = bytes[i % bytes.size()];
    rows.push_back({memory.back().get(), type.kind});
  }
};

// Decodes and packs rows as they are read from a file; whether they were packed. A product of what
// was packed reads all of it.
bool decode_and_pack(ThreadPool& pool, const StoredRows& stored, size_t columns,
                     const WeightFormat& format) {
  const size_t outputs = stored.rows.size();
  const auto values = std::make_unique<float[]>(outputs * columns);
  const auto halves = std::make_unique<uint16_t[]>(outputs * columns);
  CHECK(decode_blocks(&pool, stored.rows.data(), outputs, columns, values.get(), false).is_ok());
  CHECK(decode_blocks(&pool, stored.rows.data(), outputs, columns, halves.get(), true).is_ok());
  PackedMatrix::Config config;
  config.format = format;
  config.in_features = columns;
  config.out_features = outputs;
  Result<PackedMatrix> matrix = PackedMatrix::create(config);
  CHECK(matrix.is_ok());
  MatrixView view;
  view.rows = outputs;
  view.columns = columns;
  view.block_rows = stored.rows.data();
  if (!matrix.value().pack(pool, 0, view).is_ok()) return false;
  const std::vector<float> x(columns, 1.0f);
  std::vector<float> out(outputs);
  PackedMatrix::Batch batch;
  batch.x = x.data();
  batch.num_rows = 1;
  batch.out = out.data();
  CHECK(matrix.value().forward(pool, batch).is_ok());
  return true;
}

TEST(blocks_of_odd_sizes_are_read_within_their_bytes) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const BlockKind kind : kKinds) {
    const BlockType& type = block_type(kind);
    for (const size_t num_blocks : {1, 3, 9, 11}) {
      const size_t columns = num_blocks * type.weights;
      for (const size_t outputs : {1, 63, 65, 129}) {
        StoredRows stored;
        for (size_t i = 0; i < outputs; ++i)
          stored.add(type, columns, draw_bytes(257, static_cast<uint32_t>(columns + i)));
        for (const WeightFormat& format : kFormats)
          if (holds_blocks(format, kind)) (void)decode_and_pack(*pool, stored, columns, format);
      }
    }
  }
}

TEST(blocks_of_extreme_bytes_are_taken_or_refused) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const BlockKind kind : kKinds) {
    const BlockType& type = block_type(kind);
    const size_t columns = 5 * type.weights;
    // All halves of 0, subnormal, the largest, infinite of either sign, not a number; bytes of 255.
    const std::pair<uint16_t, bool> fills[] = {{0x0000, true},  {0x0001, true},  {0x8001, true},
                                               {0x7bff, false}, {0x7c00, false}, {0xfc00, false},
                                               {0x7e01, false}, {0xffff, false}};
    for (const auto& [half, is_harmless] : fills) {
      std::vector<uint8_t> bytes(2);
      std::memcpy(bytes.data(), &half, 2);
      for (const size_t outputs : {1, 66}) {
        StoredRows stored;
        for (size_t i = 0; i < outputs; ++i) stored.add(type, columns, bytes);
        for (const WeightFormat& format : kFormats) {
          if (!holds_blocks(format, kind)) continue;
          const bool is_packed = decode_and_pack(*pool, stored, columns, format);
          if (is_harmless) CHECK(is_packed);
          // A scale that is not finite, or e8m0's 255, never gets into a panel.
          if (half == 0xffff) CHECK(!is_packed);
        }
      }
    }
  }
}

TEST(rows_of_different_kinds_lie_in_one_matrix) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  const WeightFormat format = {8, 16, true};  // Holds all but MXFP4.
  StoredRows stored;
  size_t num_kinds = 0;
  for (size_t i = 0; i < 150; ++i) {
    const BlockType& type = block_type(kKinds[i % std::size(kKinds)]);
    if (!holds_blocks(format, type.kind)) continue;
    num_kinds += i < std::size(kKinds);
    stored.add(type, 768, draw_bytes(331, static_cast<uint32_t>(i)));
  }
  CHECK_EQ(num_kinds, std::size(kKinds) - 1);
  (void)decode_and_pack(*pool, stored, 768, format);
}

TEST(names_of_kinds_are_found) {
  for (const BlockKind kind : kKinds) {
    CHECK(block_type(kind).kind == kind);
    CHECK(find_block_kind(block_type(kind).name).value() == kind);
  }
  CHECK(!find_block_kind("IQ1_S").is_ok());
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
