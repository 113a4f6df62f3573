// The row operators for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_avx512-inl.h"
#define TANDEM_VNNI 0
#define TANDEM_BF16 0
#define TANDEM_ROW_KERNELS kRowsAvx512Bw
#include "kernels/row_ops/row_ops-inl.h"
