// The arguments of the functions that each ISA's variant of the attention kernel fills.
//
// Plain data only, no inline functions: the variants are compiled with flags of their ISA, and a
// shared inline function might be linked in the copy that only the wide machine can run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/vectors/float_type.h"

namespace tandem {

// Numbers of keys in a tile and in a split; a split is a whole number of tiles.
inline constexpr size_t kTileTokens = 64;
inline constexpr size_t kSplitTokens = 1024;
// Largest number of rows (queries of one head) of a task: 16 tokens with 8 heads, or one token with
// 128.
inline constexpr size_t kTileRows = 128;

enum class KvType { kFloat32, kBfloat16, kFp8, kInt8 };

// Layout of a KV pool, by which the key or value of a block, layer, head and token is found;
// offsets are in bytes from `base`.
struct KvView {
  const uint8_t* base = nullptr;
  KvType type = KvType::kFloat32;
  size_t num_blocks = 0;
  size_t num_layers = 0;
  size_t num_kv_heads = 0;
  size_t block_size = 0;
  size_t key_dim = 0;
  size_t value_dim = 0;
  size_t block_bytes = 0;
  size_t layer_bytes = 0;  // Of one layer's keys and values; layers lie where calls say.
  size_t head_bytes = 0;
  size_t row_bytes = 0;
  size_t value_offset = 0;  // From a key's row to its value's; 0 where a value is part of its key.
  // Byte offsets of the fp16 scales of kFp8 and kInt8, ordered by head, then by token.
  size_t key_scale_offset = 0;  // From the layer's start.
  size_t value_scale_offset = 0;
};

// The rule by which scores become weights, the same for all rows of a call.
struct AttentionRule {
  float scale = 1.0f;
  float soft_cap = 0.0f;   // score = cap * tanh(score / cap); 0 is none.
  int64_t window = 0;      // A query sees its own and window - 1 earlier keys; 0 is all.
  const float* sinks = nullptr;  // [num_heads] logits that take weight and give nothing.
  int64_t chunk = 0;  // A query sees no key before the last multiple of this; 0 is no such border.

  // Returns the position of the first key that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    int64_t first = window > 0 ? position - window + 1 : 0;
    if (chunk > 0 && position / chunk * chunk > first) first = position / chunk * chunk;
    return first > 0 ? first : 0;
  }
};

// The queries of one sequence that share a KV head, as rows: row r is query head r % group of token
// r / group.
struct QueryRows {
  const void* q = nullptr;  // Of row 0.
  FloatType type = FloatType::kFloat32;
  size_t token_stride = 0;  // Items.
  size_t group = 1;
  size_t first_row = 0;
  size_t num_rows = 0;
  size_t key_dim = 0;
};

// Partial results of rows, not yet normalised: `sums` is the sum of exp(score - largest) * value,
// and `total` the sum of the exponentials.
struct RowState {
  float* largest;  // [rows]
  float* total;    // [rows]
  float* sums;     // [rows][value columns, completed to kColumnStep]
};
inline constexpr size_t kColumnStep = 16;

// Scratch memory of one thread, aligned to 64 bytes.
struct TileScratch {
  float* scores;    // [kTileRows][kTileTokens]
  void* weights;    // [kTileRows][kTileTokens] operands.
  float* factors;   // [kTileRows]
  void* keys;       // One packed tile.
  void* values;
};

// The keys of one sequence, layer and KV head.
struct KeyRows {
  const KvView* kv;
  const int64_t* blocks;  // Of the sequence.
  size_t layer_offset;    // Bytes from a block's begin to its layer.
  size_t kv_head;
  // Ascending positions of the chosen keys; null: key i is at position i.
  const int32_t* positions;
};

struct SplitTask {
  KeyRows rows;
  AttentionRule rule;
  const void* queries;  // [num_rows] operands of load_queries.
  bool is_bf16;         // Operands are bf16; else float.
  size_t group;
  size_t first_row;
  size_t num_rows;
  // Position of the sequence's first token of this step; if keys are chosen by `positions`, its
  // index among those.
  int64_t first_position;
  size_t key_begin;  // Multiples of kTileTokens, within one split.
  size_t key_end;
  TileScratch scratch;
  RowState state;
};

struct FinishTask {
  RowState state;
  void* out;  // Of row 0.
  FloatType type;
  size_t token_stride;  // Items.
  size_t group;
  size_t first_row;
  size_t num_rows;
  size_t value_dim;
  const float* sinks;  // Of the KV head's first query head; null is none.
};

// Scores of keys in the index of sparse attention: for token t, out[key] = sum over its heads,
// ascending, of weight * max(query . key, 0). The order of the float operations depends on nothing
// else.
struct ScoreTask {
  KeyRows rows;         // Without positions of their own.
  const void* queries;  // [num_tokens * num_heads] operands of load_queries.
  bool is_bf16;
  size_t num_heads;      // At most kTileRows with all tokens.
  size_t num_tokens;
  const float* weights;  // [num_tokens][num_heads]; tokens `weight_stride` items apart.
  size_t weight_stride;
  float scale;           // On the weights.
  size_t key_begin;      // A multiple of kTileTokens.
  size_t key_end;        // Keys from here on are not there.
  TileScratch scratch;
  float* out;  // [num_tokens][key]; whole tiles are written.
  size_t out_stride;
};

struct AttentionKernels {
  void (*load_queries)(const QueryRows&, void* operand, bool is_bf16);
  // Attends rows to the keys of one split; the results begin from an empty state.
  void (*attend)(const SplitTask&);
  void (*merge)(const RowState& total, const RowState& part, size_t num_rows, size_t value_dim);
  void (*finish)(const FinishTask&);
  void (*score)(const ScoreTask&);
};

}  // namespace tandem
