// The transports by name, in the order of preference.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::transfer {

// A file has only its own transport, so that its place in the order means nothing.
enum class TransportKind : uint8_t { kLocal, kShm, kCma, kTcp, kFile };
inline constexpr std::array<std::string_view, 5> kTransportNames = {"local", "shm", "cma", "tcp",
                                                                    "file"};

constexpr std::string_view transport_name(TransportKind kind) {
  return kTransportNames[static_cast<size_t>(kind)];
}

}  // namespace tandem::transfer
