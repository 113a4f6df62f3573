// The state spaces for one ISA; the flags are in kernel_isas.cmake.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 0
#define TANDEM_BF16 0
#define TANDEM_STATE_SPACE_KERNELS kStateSpaceAvx512Bw
#include "kernels/state_space/state_space-inl.h"
