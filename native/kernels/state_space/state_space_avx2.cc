// The state spaces for one ISA; the flags are in kernel_isas.cmake.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx2-inl.h"
#define TANDEM_STATE_SPACE_KERNELS kStateSpaceAvx2
#include "kernels/state_space/state_space-inl.h"
