// The kernels over packed weights for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx2-inl.h"
#define TANDEM_EIGHTS_HEADER "kernels/vectors/eights_avx2-inl.h"
#define TANDEM_PACKED_KERNELS kPackedAvx2
#include "kernels/packed/packed-inl.h"
