// The only place where a native error becomes a Python exception.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/status.h"

namespace tandem::bindings {

// Raises the Python class of tandem.core.errors with the error's code, and with its where, what and
// field. REQUIRES: the GIL is held.
[[noreturn]] void raise(const Error& error);

inline void raise_if_error(const Status& status) {
  if (!status.is_ok()) raise(status.error());
}

// Calls `run` without the GIL, and raises the error in its Status, if any. REQUIRES: the GIL is
// held.
template <class Run>
void run_released(Run&& run) {
  Status status;
  {
    const nanobind::gil_scoped_release release;
    status = run();
  }
  raise_if_error(status);
}

template <class T>
T take(Result<T> result) {
  if (!result.is_ok()) raise(result.error());
  return std::move(result.value());
}

void bind_attention(nanobind::module_& module);
void bind_status(nanobind::module_& module);
void bind_topology(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_buffer(nanobind::module_& module);
void bind_bytes_pool(nanobind::module_& module);
void bind_probe(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_recurrent(nanobind::module_& module);
void bind_state_space(nanobind::module_& module);
void bind_row_ops(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_store(nanobind::module_& module);
void bind_store_reads(nanobind::module_& module);

}  // namespace tandem::bindings
