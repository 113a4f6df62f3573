// The kernels over packed weights for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_plain-inl.h"
#define TANDEM_PACKED_KERNELS kPackedPlain
#include "kernels/packed/packed-inl.h"
