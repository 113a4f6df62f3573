#include "base/status.h"

#include <cstring>

namespace tandem {

std::string Error::message() const { return "[" + where + "] " + what; }

std::string describe_errno(std::string_view call, int error_number) {
  return std::string(call) + " failed: " + std::strerror(error_number) + " (errno " +
         std::to_string(error_number) + ")";
}

}  // namespace tandem
