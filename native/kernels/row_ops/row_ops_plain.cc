// The row operators for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_plain-inl.h"
#define TANDEM_ROW_KERNELS kRowsPlain
#include "kernels/row_ops/row_ops-inl.h"
