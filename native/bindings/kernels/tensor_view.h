// A tensor as native operators take it: converted by DLPack once, then passed at no cost.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "bindings/status.h"
#include "kernels/vectors/float_type.h"

namespace tandem::bindings {

class TensorView {
 public:
  using Array = nanobind::ndarray<nanobind::device::cpu>;

  explicit TensorView(Array array) : array_(std::move(array)) {}

  const Array& array() const { return array_; }
  void* data() const { return array_.data(); }
  size_t num_dims() const { return array_.ndim(); }
  size_t shape(size_t i) const { return array_.shape(i); }
  // Distance in items between neighbouring indexes of dimension `i`.
  size_t stride(size_t i) const { return static_cast<size_t>(array_.stride(i)); }
  // True if the dimensions from `first_dim` on are contiguous in memory.
  bool is_dense_from(size_t first_dim) const {
    int64_t stride = 1;
    for (size_t i = num_dims(); i-- > first_dim; stride *= static_cast<int64_t>(shape(i)))
      if (shape(i) > 1 && array_.stride(i) != stride) return false;
    return true;
  }
  bool is_float() const { return is_float32() || is_bfloat16(); }
  bool is_float32() const { return array_.dtype() == nanobind::dtype<float>(); }
  bool is_bfloat16() const {
    return array_.dtype().code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Bfloat) &&
           array_.dtype().bits == 16 && array_.dtype().lanes == 1;
  }
  bool is_int64() const { return array_.dtype() == nanobind::dtype<int64_t>(); }
  bool is_int32() const { return array_.dtype() == nanobind::dtype<int32_t>(); }
  FloatType float_type() const {
    return is_float32() ? FloatType::kFloat32 : FloatType::kBfloat16;
  }
  // Returns a description for errors, such as "[2, 3] of 16-bit items of type code 4".
  std::string describe() const {
    std::string text = "[";
    for (size_t i = 0; i < num_dims(); ++i)
      text += (i > 0 ? ", " : "") + std::to_string(shape(i));
    return text + "] of " + std::to_string(array_.dtype().bits) + "-bit items of type code " +
           std::to_string(array_.dtype().code);
  }

 private:
  Array array_;
};

// Raises a ShapeError of an operator: "`name` is `view`: `wanted`".
[[noreturn]] inline void refuse_view(const char* where, const char* name, const TensorView& view,
                                     const std::string& wanted) {
  raise({Code::kShape, where, std::string(name) + " is " + view.describe() + ": " + wanted, name});
}

// Raises a ShapeError unless the tensor is [rows, columns] of float32 or bfloat16 with contiguous
// rows.
inline void check_rows(const char* where, const char* name, const TensorView& view, size_t rows,
                       size_t columns) {
  if (view.num_dims() == 2 && view.shape(0) == rows && view.shape(1) == columns &&
      view.is_dense_from(1) && view.is_float())
    return;
  refuse_view(where, name, view,
              "give [" + std::to_string(rows) + ", " + std::to_string(columns) +
                  "] of float32 or bfloat16 with dense rows");
}

// Raises a ShapeError unless the tensor is contiguous, has `rows` times `columns` items in
// dimensions of which the first is `rows`, and has a type that `has_dtype` accepts.
inline void check_dense(const char* where, const char* name, const TensorView& view, size_t rows,
                        size_t columns, bool has_dtype, const char* dtypes) {
  size_t size = 1;
  for (size_t i = 0; i < view.num_dims(); ++i) size *= view.shape(i);
  if (has_dtype && view.num_dims() >= 2 && view.shape(0) == rows && size == rows * columns &&
      view.is_dense_from(0))
    return;
  refuse_view(where, name, view,
              "give a contiguous [" + std::to_string(rows) + ", " + std::to_string(columns) +
                  "] of " + dtypes);
}

inline void check_same_type(const char* where, const char* name, const TensorView& view,
                            const TensorView& other) {
  if (view.array().dtype() != other.array().dtype())
    refuse_view(where, name, view, "give the type of the others");
}

}  // namespace tandem::bindings
