// Bindings of low-rank adapters.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::bindings {

void bind_lora(nanobind::module_& module);

}  // namespace tandem::bindings
