#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/kernels/state_views.h"
#include "bindings/kernels/tensor_view.h"
#include "bindings/status.h"
#include "kernels/state_space/mamba2.h"
#include "kernels/state_space/short_conv.h"
#include "kernels/vectors/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

constexpr const char* kConvWhere = "kernels.short_conv";
constexpr const char* kMambaWhere = "kernels.mamba2";

const StateSpaceKernels& state_space_kernels(const std::string& isa) {
  return choose_state_space_kernels(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
}

// Checks the weights of a convolution [width, channels] and, if there is one, its bias.
void check_convolution(const char* where, const TensorView& conv,
                       const std::optional<TensorView>& bias, size_t channels) {
  if (conv.num_dims() != 2 || !conv.is_float32() || !conv.is_dense_from(0) || conv.shape(0) < 1 ||
      conv.shape(0) > kMaxConvWidth || conv.shape(1) != channels || channels < 1)
    refuse_view(where, "conv", conv,
                "give a contiguous float32 [width of at most " + std::to_string(kMaxConvWidth) +
                    ", " + std::to_string(channels) + "]");
  if (bias && check_floats(where, "bias", *bias) != channels)
    refuse_view(where, "bias", *bias, "give one for each channel");
}

const float* data_of(const std::optional<TensorView>& view) {
  return view ? static_cast<const float*>(view->data()) : nullptr;
}

// A layer's short convolution: its weights, which it keeps.
class ShortConv {
 public:
  ShortConv(const TensorView& conv, const std::optional<TensorView>& bias)
      : conv_(conv), bias_(bias) {
    check_convolution(kConvWhere, conv, bias, conv.num_dims() == 2 ? conv.shape(1) : 0);
  }

  std::vector<size_t> carried_shape() const { return {conv_.shape(0) - 1, conv_.shape(1)}; }

  void run(const TensorView& x, const TensorView& out, const TensorView& carried,
           const std::vector<int64_t>& query_start, const std::vector<int64_t>& slots,
           ThreadPool* pool, const std::string& isa) const {
    if (x.num_dims() != 2) refuse_view(kConvWhere, "x", x, "give [rows, 3 * channels]");
    const size_t rows = x.shape(0), channels = conv_.shape(1);
    check_rows(kConvWhere, "x", x, rows, 3 * channels);
    check_rows(kConvWhere, "out", out, rows, channels);
    ShortConvTask task;
    place_rows(kConvWhere, {x, out, carried, query_start, slots}, carried_shape(), task);
    task.num_channels = channels;
    task.conv_width = conv_.shape(0);
    task.conv = static_cast<const float*>(conv_.data());
    task.bias = data_of(bias_);
    const StateSpaceKernels& kernels = state_space_kernels(isa);
    run_released([&] { return run_short_conv(kernels, pool, task); });
  }

 private:
  TensorView conv_;
  std::optional<TensorView> bias_;
};

// A layer's state space: its shape, and its weights, which it keeps.
class Mamba2 {
 public:
  Mamba2(const TensorView& conv, const TensorView& decay_rate, const TensorView& dt_bias,
         const TensorView& skip, const TensorView& norm, size_t num_groups, size_t state_dim,
         float norm_eps, float dt_min, float dt_max, const std::optional<TensorView>& conv_bias)
      : kept_{conv, decay_rate, dt_bias, skip, norm}, conv_bias_(conv_bias) {
    shape_.num_heads = check_floats(kMambaWhere, "decay_rate", decay_rate);
    shape_.num_groups = num_groups;
    shape_.state_dim = state_dim;
    const size_t values = check_floats(kMambaWhere, "norm", norm);
    shape_.head_dim = values / shape_.num_heads;
    for (const auto& [name, view] : {std::pair{"dt_bias", &dt_bias}, std::pair{"skip", &skip}})
      if (check_floats(kMambaWhere, name, *view) != shape_.num_heads)
        refuse_view(kMambaWhere, name, *view, "give as many as there are decay rates");
    if (num_groups < 1 || shape_.num_heads % num_groups != 0 || state_dim < 1 ||
        values % shape_.num_heads != 0 || std::max(state_dim, shape_.head_dim) > kMaxStateDim)
      raise({Code::kShape, kMambaWhere,
             std::to_string(shape_.num_heads) + " heads of " + std::to_string(values) +
                 " items, " + std::to_string(num_groups) + " groups with states of " +
                 std::to_string(state_dim) +
                 ": give heads that divide the items, groups that divide the heads, and sizes of "
                 "at most " +
                 std::to_string(kMaxStateDim),
             "num_groups"});
    check_convolution(kMambaWhere, conv, conv_bias, num_channels_of(shape_));
    shape_.conv_width = conv.shape(0);
    weights_.conv = static_cast<const float*>(conv.data());
    weights_.conv_bias = data_of(conv_bias_);
    weights_.decay_rate = static_cast<const float*>(decay_rate.data());
    weights_.dt_bias = static_cast<const float*>(dt_bias.data());
    weights_.skip = static_cast<const float*>(skip.data());
    weights_.norm = static_cast<const float*>(norm.data());
    weights_.norm_eps = norm_eps;
    weights_.dt_min = dt_min;
    weights_.dt_max = dt_max;
  }

  std::vector<size_t> state_shape() const {
    return {shape_.num_heads, num_panels_of(shape_), shape_.state_dim, kStatePanel};
  }
  std::vector<size_t> carried_shape() const {
    return {shape_.conv_width - 1, num_channels_of(shape_)};
  }

  void run(const TensorView& x, const TensorView& z, const TensorView& dt, const TensorView& mixed,
           const TensorView& out, const TensorView& states, const TensorView& carried,
           const std::vector<int64_t>& query_start, const std::vector<int64_t>& slots,
           ThreadPool* pool, const std::string& isa) const {
    if (x.num_dims() != 2) refuse_view(kMambaWhere, "x", x, "give [rows, channels]");
    const size_t rows = x.shape(0), values = num_values_of(shape_);
    check_rows(kMambaWhere, "x", x, rows, num_channels_of(shape_));
    check_rows(kMambaWhere, "dt", dt, rows, shape_.num_heads);
    check_dense(kMambaWhere, "mixed", mixed, rows, values, mixed.is_float32(), "float32");
    Mamba2Task task;
    place_states(kMambaWhere, {x, out, carried, query_start, slots}, z, states, values,
                 state_shape(), carried_shape(), task);
    task.shape = shape_;
    task.weights = weights_;
    task.dt = dt.data();
    task.dt_stride = dt.stride(0);
    task.dt_type = dt.float_type();
    task.mixed = static_cast<float*>(mixed.data());
    const StateSpaceKernels& kernels = state_space_kernels(isa);
    run_released([&] { return run_mamba2(kernels, pool, task); });
  }

 private:
  Mamba2Shape shape_;
  Mamba2Weights weights_;
  std::vector<TensorView> kept_;
  std::optional<TensorView> conv_bias_;
};

}  // namespace

void bind_state_space(nb::module_& module) {
  nb::class_<ShortConv>(module, "ShortConv",
                        "The short convolution of a layer, between its projections. Calls that use\n"
                        "other slots may run meanwhile.")
      .def(nb::init<const TensorView&, const std::optional<TensorView>&>(), "conv"_a,
           "bias"_a.none() = nb::none(),
           "Keep a layer's weights, all float32 and contiguous.\n\n"
           "Args:\n"
           "    conv: [width, channels], the oldest product first.\n"
           "    bias: [channels]; None is none.\n"
           "Raises: ShapeError.")
      .def_prop_ro("carried_shape", &ShortConv::carried_shape,
                   "Of a sequence's last products: [width - 1, channels].")
      .def("run", &ShortConv::run, "x"_a, "out"_a, "carried"_a, "query_start"_a, "slots"_a,
           "pool"_a.none() = nb::none(), "isa"_a = "",
           "Compute C * conv(B * x) of the rows of all sequences, and move their slots on.\n\n"
           "A row's result is bitwise the same in any chunk, batch and number of threads.\n\n"
           "Args:\n"
           "    x: [rows, 3 * channels]: B, C and x.\n"
           "    out: [rows, channels] of the type of x, written.\n"
           "    carried: [slots, *carried_shape] of the type of x, zero before a sequence's first row.\n"
           "    query_start: the first row of each sequence, and the number of rows.\n"
           "    slots: of the sequences, no two alike.\n"
           "Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.");
  nb::class_<Mamba2>(module, "Mamba2",
                     "The state space of a layer, between its projections. Calls that use other\n"
                     "slots may run meanwhile.")
      .def(nb::init<const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                    const TensorView&, size_t, size_t, float, float, float,
                    const std::optional<TensorView>&>(),
           "conv"_a, "decay_rate"_a, "dt_bias"_a, "skip"_a, "norm"_a, "num_groups"_a,
           "state_dim"_a, "norm_eps"_a, "dt_min"_a, "dt_max"_a, "conv_bias"_a.none() = nb::none(),
           "Keep a layer's weights, all float32 and contiguous.\n\n"
           "Args:\n"
           "    conv: [width, channels] of the short convolution, the oldest input first; channels\n"
           "        are x of all heads, then B and C of all groups.\n"
           "    decay_rate: [heads]: a decay is exp(-rate * dt).\n"
           "    dt_bias: [heads]: dt is softplus(dt + bias), at least dt_min and at most dt_max.\n"
           "    skip: [heads], the factor of x that is added to what is read.\n"
           "    norm: [heads * head_dim], of the RMSNorm of each group, with `norm_eps`.\n"
           "    num_groups: each serves as many consecutive heads.\n"
           "    state_dim: of B and C.\n"
           "    conv_bias: [channels]; None is none.\n"
           "Raises: ShapeError.")
      .def_prop_ro("state_shape", &Mamba2::state_shape,
                   "Of a sequence's state: [heads, panels, state_dim, columns of a panel].")
      .def_prop_ro("carried_shape", &Mamba2::carried_shape,
                   "Of a sequence's last inputs: [width - 1, channels].")
      .def("run", &Mamba2::run, "x"_a, "z"_a, "dt"_a, "mixed"_a, "out"_a, "states"_a, "carried"_a,
           "query_start"_a, "slots"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
           "Compute the rows of all sequences, and move their slots on.\n\n"
           "A row's result is bitwise the same in any chunk, batch and number of threads.\n\n"
           "Args:\n"
           "    x: [rows, channels], before the convolution.\n"
           "    z: [rows, heads * head_dim], of the type of x.\n"
           "    dt: [rows, heads].\n"
           "    mixed: float32 of the shape of z, contiguous scratch.\n"
           "    out: of the shape and type of z, written; may be z.\n"
           "    states: float32 [slots, *state_shape], zero before a sequence's first row.\n"
           "    carried: [slots, *carried_shape] of the type of x, likewise.\n"
           "    query_start: the first row of each sequence, and the number of rows.\n"
           "    slots: of the sequences, no two alike.\n"
           "Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.");
}

}  // namespace tandem::bindings
