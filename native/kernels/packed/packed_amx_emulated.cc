// The kernels with AMX's tiles in plain C++, for tests on any machine.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_plain-inl.h"
#define TANDEM_TILE_HEADER "kernels/packed/tiles/tile_emulated-inl.h"
#define TANDEM_PACKED_KERNELS kPackedAmxEmulated
#include "kernels/packed/packed-inl.h"
