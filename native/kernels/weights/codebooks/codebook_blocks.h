// Blocks whose codes are entries of a codebook: taken apart, and rearranged for a panel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/weights/stored_blocks.h"

namespace tandem {

// True for the types of a codebook.
bool is_codebook_kind(BlockKind kind);

// Magnitudes plus 128, an entry after the other; empty for types without a codebook.
std::vector<uint8_t> list_codebook(BlockKind kind);

// Writes codes (128 plus or minus a magnitude), levels and the fp16 number of a superblock.
// REQUIRES: is_codebook_kind(kind).
void split_codebook_block(BlockKind kind, const uint8_t* block, BlockCodes* out);

// Returns the scale of a group whose level is `level`, for an fp16 number `d`.
float codebook_scale(BlockKind kind, float d, uint8_t level);

// Writes the indices and signs of a superblock to a column of a panel's codes, as weight_format.h has
// them; none is widened.
void place_codebook_block(BlockKind kind, const uint8_t* block, size_t column, uint8_t* to);

}  // namespace tandem
