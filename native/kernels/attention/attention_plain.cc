// The attention kernel for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_plain-inl.h"
#define TANDEM_ATTENTION_KERNELS kAttentionPlain
#include "kernels/attention/attention-inl.h"
