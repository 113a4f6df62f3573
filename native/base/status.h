// Status and Result<T>: how native code reports what went wrong. No exception crosses a native
// interface; bindings/status.cc turns a Status into the Python error of the same code, once.
#pragma once

#include <array>
#include <cassert>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace tandem {

// The codes of tandem.core.errors, in the order of ERROR_CODES there; a test compares the two.
// The names are part of the wire format: never rename one.
enum class Code {
  kConfig,
  kShape,
  kUnsupported,
  kNotFound,
  kConflict,
  kCapacity,
  kOverload,
  kPeerLost,
  kDeadline,
  kCorruption,
  kCancelled,
  kPermissionDenied,
  kInternal,
};

inline constexpr std::array<std::string_view, 13> kCodeNames = {
    "config",    "shape",    "unsupported", "not_found", "conflict",          "capacity", "overload",
    "peer_lost", "deadline", "corruption",  "cancelled", "permission_denied", "internal"};

constexpr std::string_view code_name(Code code) { return kCodeNames[static_cast<size_t>(code)]; }

// An error: its code, the operation that decided it (`where`, "subsystem.verb"), the text with the
// values and what to do (`what`), and the argument at fault (`field`, may be empty).
struct Error {
  Code code = Code::kInternal;
  std::string where;
  std::string what;
  std::string field;

  // "[where] what", as the Python error prints it.
  std::string message() const;
};

// "where failed: strerror (errno n)" for a failed system call.
std::string describe_errno(std::string_view call, int error_number);

// Success, or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit
  Status(Code code, std::string where, std::string what, std::string field = "")
      : Status(Error{code, std::move(where), std::move(what), std::move(field)}) {}

  bool is_ok() const { return error_.index() == 0; }
  // REQUIRES: !is_ok().
  const Error& error() const {
    assert(!is_ok());
    return *std::get_if<1>(&error_);
  }

 private:
  std::variant<std::monostate, Error> error_;
};

// A T, or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : value_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool is_ok() const { return value_.index() == 0; }
  // REQUIRES: is_ok().
  T& value() {
    assert(is_ok());
    return *std::get_if<0>(&value_);
  }
  // REQUIRES: !is_ok().
  const Error& error() const {
    assert(!is_ok());
    return *std::get_if<1>(&value_);
  }

 private:
  std::variant<T, Error> value_;
};

}  // namespace tandem
