// The passes over logits for one ISA; the flags are in CMakeLists.txt.
#define TANDEM_VEC_HEADER "kernels/vectors/vec_plain-inl.h"
#define TANDEM_SAMPLE_KERNELS kSamplePlain
#include "kernels/sampling/sampling-inl.h"
