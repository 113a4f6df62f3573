// Memory with packed weights that somebody else owns, such as a mapped file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace tandem {

// Kept alive by whoever derives from it.
struct WeightStorage {
  virtual ~WeightStorage() = default;
  uint8_t* data = nullptr;  // 64-byte aligned.
  size_t size_bytes = 0;
  bool is_writable = false;
};

// Errors: kShape (another size, or not aligned).
Status check_storage(const WeightStorage& storage, size_t size_bytes, const char* where);

}  // namespace tandem
