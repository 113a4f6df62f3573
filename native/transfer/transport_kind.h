// The transports by name, in the order in which they are preferred.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::transfer {

enum class TransportKind : uint8_t { kLocal, kShm, kCma, kTcp };
inline constexpr std::array<std::string_view, 4> kTransportNames = {"local", "shm", "cma", "tcp"};

constexpr std::string_view transport_name(TransportKind kind) {
  return kTransportNames[static_cast<size_t>(kind)];
}

}  // namespace tandem::transfer
