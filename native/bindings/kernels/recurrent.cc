#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/kernels/state_views.h"
#include "bindings/kernels/tensor_view.h"
#include "bindings/status.h"
#include "kernels/recurrent/delta_scan.h"
#include "kernels/recurrent/gated_delta.h"
#include "kernels/vectors/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

constexpr const char* kDeltaWhere = "kernels.gated_delta";

const RecurrentKernels& recurrent_kernels(const std::string& isa) {
  return choose_recurrent_kernels(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
}

// A layer's gated delta rule: its shape, and its weights, which it keeps.
class GatedDelta {
 public:
  GatedDelta(const TensorView& conv, const TensorView& decay_rate, const TensorView& decay_bias,
             const TensorView& norm, size_t num_k_heads, size_t key_dim, float norm_eps,
             float beta_scale, const std::string& gate)
      : kept_{conv, decay_rate, decay_bias, norm} {
    shape_.num_k_heads = num_k_heads;
    shape_.num_v_heads = check_floats(kDeltaWhere, "decay_rate", decay_rate);
    shape_.key_dim = key_dim;
    shape_.value_dim = check_floats(kDeltaWhere, "norm", norm);
    if (num_k_heads < 1 || shape_.num_v_heads % num_k_heads != 0 || key_dim < 1 ||
        std::max(key_dim, shape_.value_dim) > kMaxStateDim)
      raise({Code::kShape, kDeltaWhere,
             std::to_string(shape_.num_v_heads) + " value heads of " +
                 std::to_string(shape_.value_dim) + " and " + std::to_string(num_k_heads) +
                 " key heads of " + std::to_string(key_dim) +
                 ": give key heads that divide the value heads, and sizes of at most " +
                 std::to_string(kMaxStateDim),
             "num_k_heads"});
    const size_t num_biases = check_floats(kDeltaWhere, "decay_bias", decay_bias);
    shape_.num_decays = num_biases == shape_.num_v_heads ? 1 : key_dim;
    if (num_biases != all_decays_of(shape_))
      refuse_view(kDeltaWhere, "decay_bias", decay_bias,
                  "give as many as there are decay rates, or one for each item of their keys");
    if (conv.num_dims() != 2 || !conv.is_float32() || !conv.is_dense_from(0) ||
        conv.shape(0) < 1 || conv.shape(0) > kMaxConvWidth ||
        conv.shape(1) != num_channels_of(shape_))
      refuse_view(kDeltaWhere, "conv", conv,
                  "give a contiguous float32 [width of at most " + std::to_string(kMaxConvWidth) +
                      ", " + std::to_string(num_channels_of(shape_)) + "]");
    shape_.conv_width = conv.shape(0);
    if (gate != "silu" && gate != "sigmoid")
      raise({Code::kConfig, kDeltaWhere, "unknown gate " + gate + ": choose silu or sigmoid",
             "gate"});
    weights_.conv = static_cast<const float*>(conv.data());
    weights_.decay_rate = static_cast<const float*>(decay_rate.data());
    weights_.decay_bias = static_cast<const float*>(decay_bias.data());
    weights_.norm = static_cast<const float*>(norm.data());
    weights_.norm_eps = norm_eps;
    weights_.beta_scale = beta_scale;
    weights_.is_silu_gated = gate == "silu";
  }

  std::vector<size_t> state_shape() const {
    return {shape_.num_v_heads, num_panels_of(shape_), shape_.key_dim, kStatePanel};
  }
  std::vector<size_t> carried_shape() const {
    return {shape_.conv_width - 1, num_channels_of(shape_)};
  }

  void run(const TensorView& x, const TensorView& z, const TensorView& a, const TensorView& b,
           const TensorView& out, const TensorView& states, const TensorView& carried,
           const std::vector<int64_t>& query_start, const std::vector<int64_t>& slots,
           ThreadPool* pool, const std::string& isa) const {
    if (x.num_dims() != 2) refuse_view(kDeltaWhere, "x", x, "give [rows, channels]");
    const size_t rows = x.shape(0), values = shape_.num_v_heads * shape_.value_dim;
    check_rows(kDeltaWhere, "x", x, rows, num_channels_of(shape_));
    check_rows(kDeltaWhere, "a", a, rows, all_decays_of(shape_));
    check_rows(kDeltaWhere, "b", b, rows, shape_.num_v_heads);
    check_same_type(kDeltaWhere, "b", b, a);
    GatedDeltaTask task;
    place_states(kDeltaWhere, {x, out, carried, query_start, slots}, z, states, values,
                 state_shape(), carried_shape(), task);
    task.shape = shape_;
    task.weights = weights_;
    task.a = a.data();
    task.a_stride = a.stride(0);
    task.b = b.data();
    task.b_stride = b.stride(0);
    task.gate_type = a.float_type();
    const RecurrentKernels& kernels = recurrent_kernels(isa);
    run_released([&] { return run_gated_delta(kernels, pool, task); });
  }

 private:
  GatedDeltaShape shape_;
  GatedDeltaWeights weights_;
  std::vector<TensorView> kept_;
};

constexpr const char* kScanWhere = "kernels.scan_delta";

const float* check_scanned(const char* name, const TensorView& view, std::vector<size_t> shape) {
  bool is_right = view.num_dims() == shape.size() && view.is_float32() && view.is_dense_from(0);
  for (size_t i = 0; is_right && i < shape.size(); ++i) is_right = view.shape(i) == shape[i];
  if (is_right) return static_cast<const float*>(view.data());
  std::string text;
  for (const size_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  refuse_view(kScanWhere, name, view, "give a contiguous float32 [" + text + "]");
}

float* check_written(const char* name, const TensorView& view, std::vector<size_t> shape) {
  return const_cast<float*>(check_scanned(name, view, std::move(shape)));
}

std::vector<size_t> shape_decays(const DeltaScanTask& task) {
  std::vector<size_t> shape = {task.num_tokens, task.shape.num_v_heads};
  if (task.shape.num_decays > 1) shape.push_back(task.shape.num_decays);
  return shape;
}

DeltaScanTask start_scan(const TensorView& queries, const TensorView& keys,
                         const TensorView& values, const TensorView& decay, const TensorView& beta,
                         const TensorView& state) {
  if (keys.num_dims() != 3) refuse_view(kScanWhere, "keys", keys, "give [tokens, heads, key_dim]");
  if (values.num_dims() != 3)
    refuse_view(kScanWhere, "values", values, "give [tokens, heads, value_dim]");
  DeltaScanTask task;
  task.num_tokens = keys.shape(0);
  task.shape.num_k_heads = keys.shape(1);
  task.shape.key_dim = keys.shape(2);
  task.shape.num_v_heads = values.shape(1);
  task.shape.value_dim = values.shape(2);
  const GatedDeltaShape& shape = task.shape;
  if (shape.num_k_heads < 1 || shape.num_v_heads < 1 ||
      shape.num_v_heads % shape.num_k_heads != 0 || shape.key_dim < 1 || shape.value_dim < 1 ||
      std::max(shape.key_dim, shape.value_dim) > kMaxStateDim)
    refuse_view(kScanWhere, "keys", keys,
                "give heads that divide those of values, and sizes of at most " +
                    std::to_string(kMaxStateDim));
  task.keys = check_scanned("keys", keys, {task.num_tokens, shape.num_k_heads, shape.key_dim});
  task.queries =
      check_scanned("queries", queries, {task.num_tokens, shape.num_k_heads, shape.key_dim});
  task.values =
      check_scanned("values", values, {task.num_tokens, shape.num_v_heads, shape.value_dim});
  if (decay.num_dims() == 3) task.shape.num_decays = shape.key_dim;
  task.decay = check_scanned("decay", decay, shape_decays(task));
  task.beta = check_scanned("beta", beta, {task.num_tokens, shape.num_v_heads});
  task.state = check_written(
      "state", state, {shape.num_v_heads, num_panels_of(shape), shape.key_dim, kStatePanel});
  return task;
}

void scan_delta(const TensorView& queries, const TensorView& keys, const TensorView& values,
                const TensorView& decay, const TensorView& beta, const TensorView& state,
                const TensorView& out, ThreadPool* pool, const std::string& isa) {
  DeltaScanTask task = start_scan(queries, keys, values, decay, beta, state);
  task.out = check_written("out", out,
                           {task.num_tokens, task.shape.num_v_heads, task.shape.value_dim});
  const RecurrentKernels& kernels = recurrent_kernels(isa);
  run_released([&] { return run_delta_scan(kernels, pool, task); });
}

void scan_delta_backward(const TensorView& queries, const TensorView& keys,
                         const TensorView& values, const TensorView& decay, const TensorView& beta,
                         const TensorView& state, const TensorView& d_out,
                         const TensorView& d_queries, const TensorView& d_keys,
                         const TensorView& d_values, const TensorView& d_decay,
                         const TensorView& d_beta, ThreadPool* pool, const std::string& isa) {
  const DeltaScanTask task = start_scan(queries, keys, values, decay, beta, state);
  const size_t tokens = task.num_tokens, heads = task.shape.num_v_heads;
  const size_t key_dim = task.shape.key_dim, value_dim = task.shape.value_dim;
  DeltaScanGradients gradients;
  gradients.d_out = check_scanned("d_out", d_out, {tokens, heads, value_dim});
  gradients.d_queries = check_written("d_queries", d_queries, {tokens, heads, key_dim});
  gradients.d_keys = check_written("d_keys", d_keys, {tokens, heads, key_dim});
  gradients.d_values = check_written("d_values", d_values, {tokens, heads, value_dim});
  gradients.d_decay = check_written("d_decay", d_decay, shape_decays(task));
  gradients.d_beta = check_written("d_beta", d_beta, {tokens, heads});
  const RecurrentKernels& kernels = recurrent_kernels(isa);
  run_released([&] { return run_delta_gradients(kernels, pool, task, gradients); });
}

}  // namespace

void bind_recurrent(nb::module_& module) {
  nb::class_<GatedDelta>(module, "GatedDelta",
                         "The gated delta rule of a layer, between its projections. Calls that use\n"
                         "other slots may run meanwhile.")
      .def(nb::init<const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                    size_t, size_t, float, float, const std::string&>(),
           "conv"_a, "decay_rate"_a, "decay_bias"_a, "norm"_a, "num_k_heads"_a, "key_dim"_a,
           "norm_eps"_a, "beta_scale"_a = 1.0f, "gate"_a = "silu",
           "Keep a layer's weights, all float32 and contiguous.\n\n"
           "Args:\n"
           "    conv: [width, channels] of the short convolution, the oldest input first; channels\n"
           "        are the queries and keys of all key heads, then the values of all value heads.\n"
           "    decay_rate: [value heads]: a decay is exp(-rate * softplus(a + bias)).\n"
           "    decay_bias: [value heads], or [value heads * key_dim]: each item of a key has a decay.\n"
           "    norm: [value_dim], of the RMSNorm of each head's output, with `norm_eps`.\n"
           "    num_k_heads: each serves as many consecutive value heads.\n"
           "    key_dim: of a head.\n"
           "    beta_scale: beta is this times sigmoid(b).\n"
           "    gate: of z on the normed output, silu or sigmoid.\n"
           "Raises: ShapeError; ConfigError (gate).")
      .def_prop_ro("state_shape", &GatedDelta::state_shape,
                   "Of a sequence's state: [value heads, panels, key_dim, columns of a panel].")
      .def_prop_ro("carried_shape", &GatedDelta::carried_shape,
                   "Of a sequence's last inputs: [width - 1, channels].")
      .def("run", &GatedDelta::run, "x"_a, "z"_a, "a"_a, "b"_a, "out"_a, "states"_a, "carried"_a,
           "query_start"_a, "slots"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
           "Compute the rows of all sequences, and move their slots on.\n\n"
           "A row's result is bitwise the same in any chunk, batch and number of threads.\n\n"
           "Args:\n"
           "    x: [rows, channels], before the convolution.\n"
           "    z: [rows, value heads * value_dim], of the type of x.\n"
           "    a: as `decay_bias` in each row.\n"
           "    b: [rows, value heads], of the type of a.\n"
           "    out: of the shape and type of z, written; may be z.\n"
           "    states: float32 [slots, *state_shape], zero before a sequence's first row.\n"
           "    carried: [slots, *carried_shape] of the type of x, likewise.\n"
           "    query_start: the first row of each sequence, and the number of rows.\n"
           "    slots: of the sequences, no two alike.\n"
           "Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.");
  module.def("scan_delta", &scan_delta, "queries"_a, "keys"_a, "values"_a, "decay"_a, "beta"_a,
             "state"_a, "out"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
             "The recurrence of the gated delta rule alone, over a sequence's tokens; for training.\n\n"
             "All contiguous float32.\n\n"
             "Args:\n"
             "    queries, keys: [tokens, key heads, key_dim], normed; queries scaled.\n"
             "    values: [tokens, value heads, value_dim].\n"
             "    decay: [tokens, value heads], or [tokens, value heads, key_dim].\n"
             "    beta: [tokens, value heads].\n"
             "    state: as of `GatedDelta.state_shape`; moved on.\n"
             "    out: of the shape of `values`, written.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.");
  module.def("scan_delta_backward", &scan_delta_backward, "queries"_a, "keys"_a, "values"_a,
             "decay"_a, "beta"_a, "state"_a, "d_out"_a, "d_queries"_a, "d_keys"_a, "d_values"_a,
             "d_decay"_a, "d_beta"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
             "The gradients of `scan_delta`; no gradient of the last state comes in.\n\n"
             "Computes the states again, and keeps one in 32 of a head's panel. The same for any\n"
             "number of threads.\n\n"
             "Args:\n"
             "    queries, keys, values, decay, beta: as of `scan_delta`.\n"
             "    state: that it began with; only read.\n"
             "    d_out: of the shape of `values`.\n"
             "    d_queries, d_keys: [tokens, value heads, key_dim], written: each value head's part.\n"
             "    d_values, d_decay, d_beta: of the shapes of their own, written.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.");
}

}  // namespace tandem::bindings
