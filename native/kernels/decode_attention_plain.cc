// The decode attention kernel for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_DECODE_ATTENTION decode_attention_plain
#define TANDEM_LANES 4
#include "kernels/decode_attention-inl.h"
