#include "bindings/packed_arrays.h"

#include <utility>

namespace tandem::bindings {
namespace {

// An array of Python's as storage; destroyed with the GIL held, like every bank.
struct ArrayStorage final : WeightStorage {
  explicit ArrayStorage(nb::object array) : owner(std::move(array)) {}
  nb::object owner;
};

}  // namespace

MatrixView view_matrix(const AnyInput& array, const char* where, const char* name, size_t rows,
                       size_t columns) {
  const bool has_dtype = is_float(array.dtype()) || is_bf16(array.dtype());
  check_matrix(array, where, name, has_dtype, "float32 or bfloat16", rows, columns);
  return {array.data(), is_bf16(array.dtype()), rows, columns};
}

const float* view_vector(const AnyInput& array, const char* where, const char* name, size_t size) {
  if (array.ndim() == 1 && array.shape(0) == size && is_float(array.dtype()) &&
      array.device_type() == nb::device::cpu::value && is_contiguous(array))
    return static_cast<const float*>(array.data());
  raise({Code::kShape, where,
         std::string(name) + " is " + describe_array(array) + ": give a contiguous [" +
             std::to_string(size) + "] of float32 on the CPU",
         name});
}

std::shared_ptr<const WeightStorage> view_storage(nb::object array, const char* where) {
  using Bytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
  using ConstBytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
  Bytes bytes;
  ConstBytes const_bytes;
  const bool is_writable = nb::try_cast(array, bytes, false);
  if (!is_writable && !nb::try_cast(array, const_bytes, false))
    raise({Code::kShape, where,
           "storage is not a contiguous array of uint8 on the CPU", "storage"});
  auto storage = std::make_shared<ArrayStorage>(std::move(array));
  storage->data = is_writable ? bytes.data() : const_cast<uint8_t*>(const_bytes.data());
  storage->size_bytes = is_writable ? bytes.size() : const_bytes.size();
  storage->is_writable = is_writable;
  return storage;
}

}  // namespace tandem::bindings
