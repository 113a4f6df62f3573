// The expert kernels for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vec_plain-inl.h"
#define TANDEM_EXPERT_KERNELS kExpertsPlain
#include "kernels/experts-inl.h"
