// The row operators for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vec_plain-inl.h"
#define TANDEM_ROW_KERNELS kRowsPlain
#include "kernels/row_ops-inl.h"
