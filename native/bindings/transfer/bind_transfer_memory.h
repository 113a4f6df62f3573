// Conversion of Python memory for the transfer engine.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

#include "transfer/memory/shared_memory.h"

namespace tandem::bindings {

// The bytes of a Python object, which stays alive (and cannot be resized) as long as this.
struct HostMemory {
  nanobind::ndarray<nanobind::ro> owner;
  uint8_t* data = nullptr;
  uint64_t size = 0;
  bool is_readonly = false;
};

struct SharedArray {
  std::shared_ptr<transfer::SharedMemory> memory;
};

}  // namespace tandem::bindings
