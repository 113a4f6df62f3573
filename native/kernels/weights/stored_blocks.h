// Blocks of codes as GGUF files store them: what their bytes stand for.
//
// A row of a matrix is whole blocks of 32 or 256 consecutive weights. A weight is
//   scale * (code - offset)  or  scale * code + minimum
// with scales of groups within the block. docs/design/models/gguf.md lists the types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/weights/weight_format.h"

namespace tandem {

enum class BlockKind : uint8_t {
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Nl, kIq4Xs, kMxfp4, kNvfp4,
  kIq2Xxs, kIq2Xs, kIq2S, kIq3Xxs, kIq3S
};

// Weights of the largest block, and its groups.
inline constexpr size_t kMaxBlockWeights = 256;
inline constexpr size_t kMaxBlockGroups = 16;

struct BlockType {
  BlockKind kind;
  const char* name;       // As the gguf package calls it.
  size_t weights;         // Of a block.
  size_t bytes;           // Of a block.
  size_t group_size;      // Weights that share a scale.
  int offset;             // Of the codes, where there are no minima; MXFP4 has none.
  bool has_minimum;       // Whether the file has minima.
  WeightFormat format;    // Ours that holds the codes, in as many bytes.
  WeightFormat plain;     // With fp16 scales for each group and without a table: what joins others.
};

const BlockType& block_type(BlockKind kind);

// Errors: kUnsupported (names what there is).
Result<BlockKind> find_block_kind(std::string_view name);

// Whether codes of `kind` can be laid out in `format`: their own; or one that holds the plain one,
// exactly but for scales of superblocks, whose products are rounded to fp16.
bool holds_blocks(const WeightFormat& format, BlockKind kind);

// A row of whole blocks, borrowed.
struct BlockRow {
  const uint8_t* data;
  BlockKind kind;
};

// One block taken apart.
struct BlockCodes {
  // By table: its indices; by codebook: 128 plus what was looked up.
  alignas(64) uint8_t codes[kMaxBlockWeights];
  // Of superblocks: the fp16 numbers of scales and of minima; the integers that they multiply,
  // unsigned, scales before minima. Of NVFP4: scales in e4m3, without signs.
  uint16_t halves[2];
  uint8_t levels[2 * kMaxBlockGroups];
  // Of each group. MXFP4: half of the scale, as its codes are of doubled numbers; and e8m0.
  float scales[kMaxBlockGroups];
  float minima[kMaxBlockGroups];
  uint8_t exponent;
};

// What codes by table stand for, plus BlockType::offset.
extern const uint8_t kIq4Codes[16];
extern const uint8_t kE2m1Codes[16];

// Rounds to nearest even; NaN stays NaN.
uint16_t narrow_to_bf16(float value);

// Takes a block apart. Of superblocks split_codes leaves `scales` and `minima` as they are.
void split_block(BlockKind kind, const uint8_t* block, BlockCodes* out);
void split_codes(BlockKind kind, const uint8_t* block, BlockCodes* out);

// Writes the values of rows, all of `columns` weights, one after the other: float32 operations as
// llama.cpp does them, rounded once where `is_bf16`. Without a pool in the calling thread.
// REQUIRES: columns in whole blocks of each row's kind.
Status decode_blocks(ThreadPool* pool, const BlockRow* rows, size_t num_rows, size_t columns,
                     void* out, bool is_bf16);

}  // namespace tandem
