// Bindings of the transfer engine, one file for each part.
#pragma once

#include <nanobind/nanobind.h>

namespace tandem::bindings {

void bind_direct_reader(nanobind::module_& module);
void bind_transfer_rails(nanobind::module_& module);
void bind_transfer_memory(nanobind::module_& module);
void bind_transfer_engine(nanobind::module_& module);

}  // namespace tandem::bindings
