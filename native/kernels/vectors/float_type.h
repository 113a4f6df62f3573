// The floating-point types of activations and of stored keys and values.
#pragma once

#include <cstddef>

namespace tandem {

enum class FloatType { kFloat32, kBfloat16 };

constexpr size_t float_bytes(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

}  // namespace tandem
