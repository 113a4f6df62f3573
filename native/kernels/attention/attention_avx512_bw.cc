// The attention kernel for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 0
#define TANDEM_BF16 0
#define TANDEM_ATTENTION_KERNELS kAttentionAvx512Bw
#include "kernels/attention/attention-inl.h"
