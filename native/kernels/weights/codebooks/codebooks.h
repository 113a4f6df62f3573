// The codebooks of GGUF's IQ2 and IQ3 types: eight weights (IQ2) or four (IQ3) are an index into a table of
// magnitudes, beside the signs of each. Plain data, read by sources compiled for every instruction set.
#pragma once

#include <cstdint>

namespace tandem {

// The codebooks: magnitudes plus 128, four in a word, the first in the low byte. An entry of IQ2
// has two words, an entry of IQ3 one.
extern const uint32_t* const kIq2XxsBook;  // 256 entries
extern const uint32_t* const kIq2XsBook;   // 512
extern const uint32_t* const kIq2SBook;    // 1024
extern const uint32_t* const kIq3XxsBook;  // 256
extern const uint32_t* const kIq3SBook;    // 512

}  // namespace tandem
