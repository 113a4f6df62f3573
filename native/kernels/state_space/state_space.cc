#include "kernels/state_space/state_space.h"

#include "kernels/built_isas.h"

namespace tandem {

extern const StateSpaceKernels kStateSpacePlain;
#if defined(__x86_64__)
extern const StateSpaceKernels kStateSpaceAvx2;
extern const StateSpaceKernels kStateSpaceAvx512Bw;
#endif

const StateSpaceKernels& choose_state_space_kernels(Isa isa) {
#ifdef TANDEM_BUILT_STATE_SPACE_AVX512_BW
  if (isa >= Isa::kAvx512Bw) return kStateSpaceAvx512Bw;
#endif
#ifdef TANDEM_BUILT_STATE_SPACE_AVX2
  if (isa >= Isa::kAvx2) return kStateSpaceAvx2;
#endif
  static_cast<void>(isa);
  return kStateSpacePlain;
}

}  // namespace tandem
