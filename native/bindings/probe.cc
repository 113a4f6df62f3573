#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/machine/cuda_probe.h"
#include "base/machine/system_probe.h"
#include "bindings/status.h"

namespace nb = nanobind;

namespace tandem::bindings {

void bind_probe(nb::module_& module) {
  nb::class_<ProbeResult>(module, "ProbeResult", "Whether a service of the kernel is usable.")
      .def_ro("is_available", &ProbeResult::is_available)
      .def_ro("detail", &ProbeResult::detail, "What was found, or why it is not usable.");
  nb::class_<CudaDevice>(module, "CudaDevice", "A device that the CUDA driver offers.")
      .def_ro("name", &CudaDevice::name)
      .def_ro("compute_major", &CudaDevice::compute_major)
      .def_ro("compute_minor", &CudaDevice::compute_minor)
      .def_ro("memory_bytes", &CudaDevice::memory_bytes);
  nb::class_<CudaProbe>(module, "CudaProbe", "What the CUDA driver says.")
      .def_ro("is_available", &CudaProbe::is_available)
      .def_ro("detail", &CudaProbe::detail)
      .def_ro("devices", &CudaProbe::devices);
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  module.def("probe_io_uring", &probe_io_uring, release, "Set up a ring and close it.");
  module.def("probe_cma", &probe_cma, release, "Read own memory by process_vm_readv.");
  module.def("probe_cuda", &probe_cuda, release,
             "Ask the CUDA driver, loaded at run time. A process that forks afterwards cannot use "
             "CUDA in the child.");
}

}  // namespace tandem::bindings
