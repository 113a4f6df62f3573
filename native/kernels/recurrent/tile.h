// The scratch memory of a tile of tokens, shared by the gated delta rule's body and the code that allocates it.
#pragma once

#include <stddef.h>

#include "kernels/recurrent/gated_delta.h"

namespace tandem {

// Number of tokens that pass over a panel before the next panel: enough that the time to load the
// panel hardly counts.
inline constexpr size_t kDeltaTokens = 32;

// Rows of queries and keys are filled up to whole blocks of 64 items, rows of values to whole
// panels.
static inline size_t key_stride_of(const GatedDeltaShape& shape) {
  return (shape.key_dim + 63) / 64 * 64;
}
static inline size_t value_stride_of(const GatedDeltaShape& shape) {
  return num_panels_of(shape) * kStatePanel;
}

// Scratch memory for a tile of kDeltaTokens tokens.
struct DeltaTile {
  float* queries;  // [token][key_stride], normed and scaled.
  float* keys;     // [token][key_stride], normed.
  float* values;   // [token][value_stride]; become outputs.
  float* decay;
  float* beta;
  float* product;  // Of query and key.
  // Only for heads with a decay for each key item, [token][key_stride]: the decays, and the queries
  // and keys multiplied with them.
  float* decays;
  float* decayed_queries;
  float* decayed_keys;
};

static inline bool decays_by_item(const GatedDeltaShape& shape) { return shape.num_decays > 1; }
static inline size_t tile_floats(const GatedDeltaShape& shape) {
  const size_t key_rows = decays_by_item(shape) ? 5 : 2;
  return kDeltaTokens * (key_rows * key_stride_of(shape) + value_stride_of(shape) + 3);
}

static inline DeltaTile split_scratch(const GatedDeltaShape& shape, float* scratch) {
  const size_t keys = kDeltaTokens * key_stride_of(shape);
  const size_t values = kDeltaTokens * value_stride_of(shape);
  float* const gates = scratch + 2 * keys + values;
  float* const decays = gates + 3 * kDeltaTokens;
  DeltaTile tile = {scratch, scratch + keys, scratch + 2 * keys, gates, gates + kDeltaTokens,
                    gates + 2 * kDeltaTokens, nullptr, nullptr, nullptr};
  if (decays_by_item(shape))
    tile.decays = decays, tile.decayed_queries = decays + keys, tile.decayed_keys = decays + 2 * keys;
  return tile;
}

// Scratch memory for the gradients of a scan, one panel at a time.
struct GradientTile {
  float* starts;  // [tiles][key_dim][32]: the state before each tile.
  float* states;  // [token + 1][key_dim][32]: those within a tile.
  float* slope;   // [key_dim][32]: the gradient of the state.
  float* gaps;    // [token][32]: values less what the state foretold.
};

static inline size_t panel_floats(const GatedDeltaShape& shape) {
  return shape.key_dim * kStatePanel;
}
static inline size_t num_tiles_of(size_t num_tokens) {
  return (num_tokens + kDeltaTokens - 1) / kDeltaTokens;
}
static inline size_t gradient_floats(const GatedDeltaShape& shape, size_t num_tokens) {
  return (num_tiles_of(num_tokens) + kDeltaTokens + 2) * panel_floats(shape) +
         kDeltaTokens * kStatePanel;
}
static inline GradientTile split_gradients(const GatedDeltaShape& shape, size_t num_tokens,
                                           float* scratch) {
  const size_t panel = panel_floats(shape);
  float* const states = scratch + num_tiles_of(num_tokens) * panel;
  float* const slope = states + (kDeltaTokens + 1) * panel;
  return {scratch, states, slope, slope + panel};
}

}  // namespace tandem
