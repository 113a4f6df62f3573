// The kernels of mixers that are state spaces, of one instruction set.
#pragma once

#include <cstddef>

#include "kernels/vectors/isa.h"

namespace tandem {

struct Mamba2Task;
struct Mamba2Item;
struct ShortConvTask;
struct ShortConvItem;

// `scratch` is the thread's: mamba2_scratch floats of the shape.
struct StateSpaceKernels {
  void (*short_conv)(const ShortConvTask& task, const ShortConvItem& item);
  void (*mamba2)(const Mamba2Task& task, const Mamba2Item& item, float* scratch);
  // The norm of one group of a row.
  void (*mamba2_norm)(const Mamba2Task& task, size_t row, size_t group);
};

// The kernels for an ISA of `available_isas()`.
const StateSpaceKernels& choose_state_space_kernels(Isa isa);

}  // namespace tandem
