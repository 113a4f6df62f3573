// The passes over logits for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx2-inl.h"
#define TANDEM_SAMPLE_KERNELS kSampleAvx2
#include "kernels/sampling/sampling-inl.h"
