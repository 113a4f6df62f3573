// The kernels of mixers that are state spaces, of one instruction set.
#pragma once

#include <cstddef>

#include "kernels/vectors/isa.h"

namespace tandem {

struct Mamba2Task;
struct Mamba2Item;
struct ShortConvTask;
struct ShortConvItem;

// The kernels of one ISA. `scratch` is memory of the calling thread, of mamba2_scratch floats.
struct StateSpaceKernels {
  void (*short_conv)(const ShortConvTask& task, const ShortConvItem& item);
  void (*mamba2)(const Mamba2Task& task, const Mamba2Item& item, float* scratch);
  // Norms one group of a row.
  void (*mamba2_norm)(const Mamba2Task& task, size_t row, size_t group);
};

// Returns the kernels for an ISA of `available_isas()`.
const StateSpaceKernels& choose_state_space_kernels(Isa isa);

}  // namespace tandem
