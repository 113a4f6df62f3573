// The bodies of the state spaces, compiled once per ISA.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/state_space/mamba2.h"
#include "kernels/state_space/mamba2_tile.h"
#include "kernels/state_space/short_conv.h"

namespace tandem {
namespace {

#include TANDEM_VEC_HEADER

#include "kernels/vectors/vec_float-inl.h"

#include "kernels/vectors/rows-inl.h"

#include "kernels/recurrent/convolve-inl.h"

#include "kernels/state_space/short_conv-inl.h"

#include "kernels/state_space/mamba2-inl.h"

}  // namespace

extern const StateSpaceKernels TANDEM_STATE_SPACE_KERNELS;
const StateSpaceKernels TANDEM_STATE_SPACE_KERNELS = {short_conv, mamba2, mamba2_norm};

}  // namespace tandem
