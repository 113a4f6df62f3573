// Detection of the CUDA devices that the driver offers. The driver's library is opened at run time
// (dlopen), so the build needs no CUDA, and on a machine without CUDA the result is a reason.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct CudaDevice {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int64_t memory_bytes = 0;
};

struct CudaProbe {
  bool is_available = false;  // At least one device.
  std::string detail;         // Driver version, or why there is none.
  std::vector<CudaDevice> devices;
};

// Initialises the driver in this process (no context is created): a process that forks afterwards
// cannot use CUDA in the child. Cost: up to a second on a machine with many devices.
CudaProbe probe_cuda();

}  // namespace tandem
