// Common parts of the bindings of operators over packed weights: checks of arrays, and memory of
// Python arrays as storage.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/status.h"
#include "kernels/weights/packing.h"
#include "kernels/weights/weight_memory.h"

namespace tandem::bindings {

namespace nb = nanobind;

// An array argument of any type. It is checked after it was taken, so that a wrong one raises a
// ShapeError with the reason and is not silently converted.
using AnyInput = nb::ndarray<nb::ro>;
using AnyOutput = nb::ndarray<>;

template <class Array>
std::string describe_array(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  return text + "] of " + std::to_string(array.dtype().bits) + "-bit items of type code " +
         std::to_string(array.dtype().code);
}

template <class Array>
bool is_contiguous(const Array& array) {
  if (array.size() == 0) return true;
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0; stride *= static_cast<int64_t>(array.shape(i)))
    if (array.shape(i) > 1 && array.stride(i) != stride) return false;
  return true;
}

inline bool is_bf16(const nb::dlpack::dtype& dtype) {
  return dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16 &&
         dtype.lanes == 1;
}

// Raises ShapeError unless the array is contiguous, on the CPU, of one of the types and [rows,
// columns].
template <class Array>
void check_matrix(const Array& array, const char* where, const char* name, bool has_dtype,
                  const char* dtypes, size_t rows, size_t columns) {
  const bool is_on_cpu = array.device_type() == nb::device::cpu::value;
  if (has_dtype && is_on_cpu && array.ndim() == 2 && array.shape(0) == rows &&
      array.shape(1) == columns && is_contiguous(array))
    return;
  raise({Code::kShape, where,
         std::string(name) + " is " + describe_array(array) + ": give a contiguous [" +
             std::to_string(rows) + ", " + std::to_string(columns) + "] of " + dtypes +
             " on the CPU",
         name});
}

inline bool is_float(const nb::dlpack::dtype& dtype) { return dtype == nb::dtype<float>(); }

// Makes a weight format from the fields that Python has; raises UnsupportedError for an unknown
// code table.
WeightFormat make_format(int bits, int group_size, bool has_minimum, bool is_float, int scale_bits,
                         int table, bool has_zeros);

// Returns a view of weights in fp32 or bf16, contiguous, [rows, columns]; raises ShapeError
// otherwise.
MatrixView view_matrix(const AnyInput& array, const char* where, const char* name, size_t rows,
                       size_t columns);

// Returns a view of quantized weights: codes [rows, columns], uint8, with scales and minima as
// MatrixView needs them for the format; raises ShapeError otherwise.
MatrixView view_codes(const WeightFormat& format, const nb::object& codes, const nb::object& scales,
                      const nb::object& minima, const char* where, const char* name, size_t rows,
                      size_t columns);

// A matrix stored in blocks of codes: tensors (kind of block, uint8 [rows, bytes]) one below the
// other, and an order of their rows (int64) or None.
using BlockParts = std::tuple<std::vector<std::tuple<std::string, nb::object>>, nb::object>;

// Returns the rows of blocks of a matrix [rows, columns], borrowed from `parts`. Raises ShapeError;
// UnsupportedError (an unknown kind of block, or one that the format cannot hold).
std::vector<BlockRow> list_block_rows(const BlockParts& parts, const char* where, const char* name,
                                      size_t rows, size_t columns);
void check_block_rows(const WeightFormat& format, const std::vector<BlockRow>& rows,
                      const char* where, const char* name);

// Returns the data of a contiguous fp32 vector; raises ShapeError otherwise.
const float* view_vector(const AnyInput& array, const char* where, const char* name, size_t size);

// Returns the memory of a uint8 array as storage of packed weights, and keeps the array alive; a
// read-only array gives storage that cannot be written. Raises ShapeError.
std::shared_ptr<const WeightStorage> view_storage(nb::object array, const char* where);

}  // namespace tandem::bindings
