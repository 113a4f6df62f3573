// The expert kernels for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vec_avx2-inl.h"
#define TANDEM_EXPERT_KERNELS kExpertsAvx2
#include "kernels/experts-inl.h"
