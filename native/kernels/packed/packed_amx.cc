// The kernels over packed weights for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 1
#define TANDEM_BF16 1
#define TANDEM_TILE_HEADER "kernels/packed/tiles/tile_amx-inl.h"
#define TANDEM_PACKED_KERNELS kPackedAmx
#include "kernels/packed/packed-inl.h"
