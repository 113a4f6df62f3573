// The passes over logits for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 0
#define TANDEM_BF16 0
#define TANDEM_SAMPLE_KERNELS kSampleAvx512Bw
#include "kernels/sampling/sampling-inl.h"
