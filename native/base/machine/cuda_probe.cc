#include "base/machine/cuda_probe.h"

#include <dlfcn.h>

namespace tandem {
namespace {

// The few entries of the driver API (cuda.h) that are used; CUresult and CUdevice are ints.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*driver_version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_name)(char*, int, int) = nullptr;
  int (*device_attribute)(int*, int, int) = nullptr;
  int (*device_memory)(size_t*, int) = nullptr;
  int (*error_name)(int, const char**) = nullptr;
};

constexpr int kComputeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeMinor = 76;

template <class Function>
bool load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

bool load_all(void* library, Driver& driver) {
  return load(library, "cuInit", driver.init) &&
         load(library, "cuDriverGetVersion", driver.driver_version) &&
         load(library, "cuDeviceGetCount", driver.device_count) &&
         load(library, "cuDeviceGet", driver.device_get) &&
         load(library, "cuDeviceGetName", driver.device_name) &&
         load(library, "cuDeviceGetAttribute", driver.device_attribute) &&
         load(library, "cuDeviceTotalMem_v2", driver.device_memory) &&
         load(library, "cuGetErrorName", driver.error_name);
}

std::string describe_failure(const Driver& driver, const char* call, int code) {
  const char* name = nullptr;
  driver.error_name(code, &name);
  return std::string(call) + " failed: " + (name == nullptr ? "unknown" : name) + " (" +
         std::to_string(code) + ")";
}

CudaProbe query(const Driver& driver) {
  CudaProbe probe;
  if (const int code = driver.init(0); code != 0) {
    probe.detail = describe_failure(driver, "cuInit", code);
    return probe;
  }
  int version = 0, count = 0;
  driver.driver_version(&version);
  if (const int code = driver.device_count(&count); code != 0) {
    probe.detail = describe_failure(driver, "cuDeviceGetCount", code);
    return probe;
  }
  for (int i = 0; i < count; ++i) {
    CudaDevice device;
    int handle = 0;
    char name[256] = {};
    size_t memory_bytes = 0;
    if (driver.device_get(&handle, i) != 0) continue;
    if (driver.device_name(name, sizeof name, handle) == 0) device.name = name;
    driver.device_attribute(&device.compute_major, kComputeMajor, handle);
    driver.device_attribute(&device.compute_minor, kComputeMinor, handle);
    if (driver.device_memory(&memory_bytes, handle) == 0)
      device.memory_bytes = static_cast<int64_t>(memory_bytes);
    probe.devices.push_back(device);
  }
  probe.is_available = !probe.devices.empty();
  probe.detail = "driver for CUDA " + std::to_string(version / 1000) + "." +
                 std::to_string(version % 1000 / 10) + ", " +
                 std::to_string(probe.devices.size()) + " devices";
  return probe;
}

}  // namespace

CudaProbe probe_cuda() {
  // Never closed: the driver does not survive being unloaded after cuInit.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CudaProbe probe;
  if (library == nullptr) {
    const char* text = dlerror();
    probe.detail = text == nullptr ? "libcuda.so.1 not found" : text;
    return probe;
  }
  Driver driver;
  if (!load_all(library, driver)) {
    probe.detail = "libcuda.so.1 lacks an entry of the driver API: the driver is too old";
    return probe;
  }
  return query(driver);
}

}  // namespace tandem
