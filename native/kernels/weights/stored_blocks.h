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

// Numbers of weights and of groups in the largest block.
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

// Returns the kind of block with a name. Errors: kUnsupported (lists the known kinds).
Result<BlockKind> find_block_kind(std::string_view name);

// True if codes of `kind` can be stored in `format`: in the kind's own format, or in one that holds
// its plain format. That is exact, except that scales of superblocks, which are products, are
// rounded to fp16.
bool holds_blocks(const WeightFormat& format, BlockKind kind);

// One row of a matrix as consecutive whole blocks, borrowed.
struct BlockRow {
  const uint8_t* data;
  BlockKind kind;
};

// The parts of one block: codes, scales and minima.
struct BlockCodes {
  // Codes of the weights: in kinds with a table, indices into it; in kinds with a codebook, 128
  // plus the value found there.
  alignas(64) uint8_t codes[kMaxBlockWeights];
  // For superblocks: the fp16 numbers of scales and of minima, and the integers that are multiplied
  // with them, unsigned, scales before minima. For NVFP4: `levels` has the scales in e4m3, without
  // signs.
  uint16_t halves[2];
  uint8_t levels[2 * kMaxBlockGroups];
  // Scale and minimum of each group. For MXFP4: half of the scale, because its codes are those of
  // doubled numbers; `exponent` is the e8m0 scale itself.
  float scales[kMaxBlockGroups];
  float minima[kMaxBlockGroups];
  uint8_t exponent;
};

// Values of the codes of kinds with a table, plus BlockType::offset.
extern const uint8_t kIq4Codes[16];
extern const uint8_t kE2m1Codes[16];

// Rounds a float to bf16, to nearest even; NaN stays NaN.
uint16_t narrow_to_bf16(float value);

// split_block takes a block apart; split_codes does the same, but for superblocks leaves `scales`
// and `minima` unset.
void split_block(BlockKind kind, const uint8_t* block, BlockCodes* out);
void split_codes(BlockKind kind, const uint8_t* block, BlockCodes* out);

// Writes the dequantized values of rows of `columns` weights each, one after the other, by float32
// operations as in llama.cpp, rounded once to bf16 if `is_bf16`. Runs on the calling thread without
// a pool. REQUIRES: `columns` is whole blocks of each row's kind.
Status decode_blocks(ThreadPool* pool, const BlockRow* rows, size_t num_rows, size_t columns,
                     void* out, bool is_bf16);

}  // namespace tandem
