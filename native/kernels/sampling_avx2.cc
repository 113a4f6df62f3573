// The passes over logits for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vec_avx2-inl.h"
#define TANDEM_SAMPLE_KERNELS kSampleAvx2
#include "kernels/sampling-inl.h"
