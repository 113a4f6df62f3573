// Common parts of the bindings of layers with a recurrent state. Failed checks raise a ShapeError
// of the operator `where`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/kernels/tensor_view.h"
#include "bindings/status.h"
#include "kernels/recurrent/rows.h"

namespace tandem::bindings {

// Returns the size of a contiguous float32 vector.
inline size_t check_floats(const char* where, const char* name, const TensorView& view) {
  if (view.num_dims() != 1 || !view.is_float32() || !view.is_dense_from(0) || view.shape(0) < 1)
    refuse_view(where, name, view, "give a contiguous float32 vector");
  return view.shape(0);
}

// Returns the number of slots of this shape.
inline size_t check_slots(const char* where, const char* name, const TensorView& view,
                          const std::vector<size_t>& shape, bool has_type) {
  bool is_right = view.num_dims() == shape.size() + 1 && has_type && view.is_dense_from(1);
  for (size_t i = 0; is_right && i < shape.size(); ++i) is_right = view.shape(i + 1) == shape[i];
  if (is_right) return view.shape(0);
  std::string text;
  for (const size_t size : shape) text += ", " + std::to_string(size);
  refuse_view(where, name, view, "give [slots" + text + "], dense slots");
}

inline void check_sequences(const char* where, size_t rows, size_t num_slots,
                            const std::vector<int64_t>& query_start,
                            const std::vector<int64_t>& slots) {
  if (query_start.size() != slots.size() + 1 || query_start.front() != 0 ||
      !std::is_sorted(query_start.begin(), query_start.end()) ||
      query_start.back() != static_cast<int64_t>(rows))
    raise({Code::kShape, where,
           std::to_string(query_start.size()) + " bounds of " + std::to_string(slots.size()) +
               " sequences: give one more than sequences, ascending from 0 to " +
               std::to_string(rows),
           "query_start"});
  std::vector<int64_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  const bool is_unique = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (!is_unique || (!sorted.empty() && (sorted.front() < 0 ||
                                         sorted.back() >= static_cast<int64_t>(num_slots))))
    raise({Code::kShape, where,
           "slots that are used twice or beyond the " + std::to_string(num_slots) +
               " there are: give each sequence its own",
           "slots"});
}

// The array arguments of a call that computes the rows of several sequences in a layer with a
// state.
struct RowViews {
  const TensorView& x;
  const TensorView& out;
  const TensorView& carried;
  const std::vector<int64_t>& query_start;
  const std::vector<int64_t>& slots;
};

// Checks the arguments, except the widths of x and out and the number of slots of other arrays, and
// stores them in the task.
inline void place_rows(const char* where, const RowViews& views,
                       const std::vector<size_t>& carried_shape, SequenceRows& task) {
  const TensorView &x = views.x, &out = views.out, &carried = views.carried;
  check_same_type(where, "out", out, x);
  check_same_type(where, "carried", carried, x);
  const size_t num_slots = check_slots(where, "carried", carried, carried_shape, true);
  check_sequences(where, x.shape(0), num_slots, views.query_start, views.slots);
  task.x = x.data();
  task.x_stride = x.stride(0);
  task.type = x.float_type();
  task.out = out.data();
  task.out_stride = out.stride(0);
  task.carried = carried.data();
  task.carried_stride = carried.stride(0);
  task.query_start = views.query_start.data();
  task.slots = views.slots.data();
  task.num_sequences = views.slots.size();
}

// Does the same as place_rows for a layer with a gate, which is as wide as `out`, and with state
// matrices.
inline void place_states(const char* where, const RowViews& views, const TensorView& z,
                         const TensorView& states, size_t num_values,
                         const std::vector<size_t>& state_shape,
                         const std::vector<size_t>& carried_shape, StateRows& task) {
  check_rows(where, "z", z, views.x.shape(0), num_values);
  check_rows(where, "out", views.out, views.x.shape(0), num_values);
  check_same_type(where, "z", z, views.x);
  const size_t num_slots = check_slots(where, "states", states, state_shape, states.is_float32());
  if (check_slots(where, "carried", views.carried, carried_shape, true) != num_slots)
    refuse_view(where, "carried", views.carried, "give as many slots as there are states");
  place_rows(where, views, carried_shape, task);
  task.z = z.data();
  task.z_stride = z.stride(0);
  task.states = static_cast<float*>(states.data());
  task.state_stride = states.stride(0);
}

}  // namespace tandem::bindings
