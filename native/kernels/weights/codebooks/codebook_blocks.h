// Functions on GGUF blocks whose codes are entries of a codebook: they take blocks apart, or
// rearrange them for a panel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/weights/stored_blocks.h"

namespace tandem {

// True for the kinds of blocks that use a codebook.
bool is_codebook_kind(BlockKind kind);

// Returns the codebook's magnitudes plus 128, entry after entry; empty for kinds without a
// codebook.
std::vector<uint8_t> list_codebook(BlockKind kind);

// Writes codes (128 plus or minus a magnitude), levels and the fp16 number of a superblock.
// REQUIRES: is_codebook_kind(kind).
void split_codebook_block(BlockKind kind, const uint8_t* block, BlockCodes* out);

// Returns the scale of a group whose level is `level`, for an fp16 number `d`.
float codebook_scale(BlockKind kind, float d, uint8_t level);

// Writes the indices and signs of a superblock to a column of a panel, in the layout of
// weight_format.h, without looking them up.
void place_codebook_block(BlockKind kind, const uint8_t* block, size_t column, uint8_t* to);

}  // namespace tandem
