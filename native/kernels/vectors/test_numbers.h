// Numbers for the native tests of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem {

// A fixed linear congruential generator: the same values on every machine.
class TestNumbers {
 public:
  float uniform() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }
  std::vector<float> vector(size_t size) {
    std::vector<float> values(size);
    for (float& value : values) value = uniform();
    return values;
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace tandem
