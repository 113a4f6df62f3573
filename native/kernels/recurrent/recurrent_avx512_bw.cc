// The recurrent operators for one ISA; the flags are in kernel_isas.cmake.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 0
#define TANDEM_BF16 0
#define TANDEM_RECURRENT_KERNELS kRecurrentAvx512Bw
#include "kernels/recurrent/gated_delta-inl.h"
