// The recurrent operators for one ISA; the flags are in kernel_isas.cmake.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx2-inl.h"
#define TANDEM_RECURRENT_KERNELS kRecurrentAvx2
#include "kernels/recurrent/gated_delta-inl.h"
