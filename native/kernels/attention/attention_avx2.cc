// The attention kernel for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx2-inl.h"
#define TANDEM_ATTENTION_KERNELS kAttentionAvx2
#include "kernels/attention/attention-inl.h"
