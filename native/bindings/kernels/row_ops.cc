#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>

#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/row_ops/row_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

// Items of work below which releasing the GIL costs more than the work takes.
constexpr size_t kMinReleasedItems = 32 * 1024;

const RowKernels& row_kernels(const std::string& isa) {
  return choose_row_kernels(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
}

template <class Run>
void run_sized(size_t num_items, Run run) {
  if (num_items < kMinReleasedItems)
    raise_if_error(run());
  else
    run_released(run);
}

void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& out, float eps,
              const TensorView* residual, ThreadPool* pool, const std::string& isa,
              float weight_offset) {
  constexpr const char* kWhere = "kernels.rms_norm";
  if (x.num_dims() != 2) refuse_view(kWhere, "x", x, "give [rows, size]");
  const size_t rows = x.shape(0), size = x.shape(1);
  check_rows(kWhere, "x", x, rows, size);
  check_rows(kWhere, "out", out, rows, size);
  if (weight.num_dims() != 1 || weight.shape(0) != size || !weight.is_dense_from(0))
    refuse_view(kWhere, "weight", weight, "give [" + std::to_string(size) + "]");
  check_same_type(kWhere, "weight", weight, out);
  NormTask task;
  task.x = x.data();
  task.x_stride = x.stride(0);
  task.x_type = x.float_type();
  if (residual != nullptr) {
    check_rows(kWhere, "residual", *residual, rows, size);
    check_same_type(kWhere, "residual", *residual, out);
    task.residual = residual->data();
    task.residual_stride = residual->stride(0);
  } else {
    check_same_type(kWhere, "x", x, out);
  }
  task.weight = weight.data();
  task.out = out.data();
  task.out_stride = out.stride(0);
  task.type = out.float_type();
  task.num_rows = rows;
  task.size = size;
  task.eps = eps;
  task.weight_offset = weight_offset;
  if (rows == 0 || size == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(rows * size, [&] { return run_norm(kernels, pool, task); });
}

const void* check_head_weight(const TensorView* weight, const char* name, const TensorView& x,
                              size_t head_dim) {
  constexpr const char* kWhere = "kernels.rotate_heads";
  if (weight == nullptr) return nullptr;
  if (weight->num_dims() != 1 || weight->shape(0) != head_dim || !weight->is_dense_from(0))
    refuse_view(kWhere, name, *weight, "give [" + std::to_string(head_dim) + "]");
  check_same_type(kWhere, name, *weight, x);
  return weight->data();
}

void rotate_heads(const TensorView& x, const TensorView& cos, const TensorView& sin,
                  size_t num_q_heads, size_t num_k_heads, const TensorView* q_weight,
                  const TensorView* k_weight, float eps, ThreadPool* pool,
                  const std::string& isa, float weight_offset) {
  constexpr const char* kWhere = "kernels.rotate_heads";
  if (x.num_dims() != 3 || !x.is_dense_from(1) || !x.is_float() || x.shape(2) > kMaxHeadDim ||
      x.shape(1) < num_q_heads + num_k_heads)
    refuse_view(kWhere, "x", x,
                "give [rows, heads, head_dim] of float32 or bfloat16 with dense rows, of at least " +
                    std::to_string(num_q_heads + num_k_heads) + " heads of at most " +
                    std::to_string(kMaxHeadDim));
  const size_t rows = x.shape(0), head_dim = x.shape(2);
  for (const auto& [angles, name] : {std::pair(&cos, "cos"), std::pair(&sin, "sin")}) {
    if (angles->num_dims() != 2 || angles->shape(0) != rows || angles->shape(1) > head_dim ||
        angles->shape(1) % 2 != 0 || !angles->is_dense_from(1))
      refuse_view(kWhere, name, *angles, "give [rows, an even number of rotated items]");
    check_same_type(kWhere, name, *angles, x);
  }
  if (cos.shape(1) != sin.shape(1) || (rows > 1 && cos.stride(0) != sin.stride(0)))
    refuse_view(kWhere, "sin", sin, "give the shape and strides of cos");
  HeadsTask task;
  task.x = x.data();
  task.x_stride = x.stride(0);
  task.type = x.float_type();
  task.num_rows = rows;
  task.num_q_heads = num_q_heads;
  task.num_k_heads = num_k_heads;
  task.head_dim = head_dim;
  task.q_weight = check_head_weight(q_weight, "q_weight", x, head_dim);
  task.k_weight = check_head_weight(k_weight, "k_weight", x, head_dim);
  task.eps = eps;
  task.weight_offset = weight_offset;
  task.cos = cos.data();
  task.sin = sin.data();
  task.angle_stride = cos.stride(0);
  task.rotary_size = cos.shape(1);
  if (rows == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(rows * head_dim * (num_q_heads + num_k_heads),
               [&] { return run_heads(kernels, pool, task); });
}

void place_latents(const TensorView& q, const TensorView& kv, const TensorView& weight, float eps,
                   const TensorView& cos, const TensorView& sin, const TensorView& out,
                   ThreadPool* pool, const std::string& isa) {
  constexpr const char* kWhere = "kernels.place_latents";
  LatentsTask task;
  if (q.num_dims() != 3 || !q.is_dense_from(1) || !q.is_float())
    refuse_view(kWhere, "q", q, "give [rows, heads, head_dim] with dense rows");
  task.num_rows = q.shape(0);
  task.num_heads = q.shape(1);
  task.head_dim = q.shape(2);
  if (weight.num_dims() != 1 || !weight.is_dense_from(0) || weight.shape(0) < 1)
    refuse_view(kWhere, "weight", weight, "give [rank]");
  task.rank = weight.shape(0);
  if (kv.num_dims() != 2 || kv.shape(1) < task.rank)
    refuse_view(kWhere, "kv", kv, "give [rows, rank + rotated items]");
  task.rotary_size = kv.shape(1) - task.rank;
  check_rows(kWhere, "kv", kv, task.num_rows, task.rank + task.rotary_size);
  if (task.rotary_size % 2 != 0 || task.rotary_size > task.head_dim ||
      task.rotary_size > kMaxHeadDim)
    refuse_view(kWhere, "kv", kv,
                "rotate an even number of items, at most " + std::to_string(task.head_dim) +
                    " and " + std::to_string(kMaxHeadDim));
  for (const auto& [angles, name] : {std::pair(&cos, "cos"), std::pair(&sin, "sin")}) {
    check_rows(kWhere, name, *angles, task.num_rows, task.rotary_size);
    check_same_type(kWhere, name, *angles, q);
  }
  if (task.num_rows > 1 && cos.stride(0) != sin.stride(0))
    refuse_view(kWhere, "sin", sin, "give the strides of cos");
  if (out.num_dims() != 3 || out.shape(0) != task.num_rows || out.shape(1) != task.num_heads + 1 ||
      out.shape(2) != task.rank + task.rotary_size || !out.is_dense_from(1))
    refuse_view(kWhere, "out", out, "give [rows, heads + 1, rank + rotated items], dense rows");
  check_same_type(kWhere, "kv", kv, q);
  check_same_type(kWhere, "weight", weight, q);
  check_same_type(kWhere, "out", out, q);
  task.q = q.data();
  task.q_stride = q.stride(0);
  task.kv = kv.data();
  task.kv_stride = kv.stride(0);
  task.weight = weight.data();
  task.eps = eps;
  task.cos = cos.data();
  task.sin = sin.data();
  task.angle_stride = cos.stride(0);
  task.out = out.data();
  task.out_stride = out.stride(0);
  task.type = q.float_type();
  if (task.num_rows == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(task.num_rows * (task.rank + (task.num_heads + 1) * task.rotary_size),
            [&] { return run_latents(kernels, pool, task); });
}

GateKind find_gate(const std::string& name) {
  constexpr std::array<const char*, 4> kNames = {"silu", "gelu", "gelu_tanh", "sigmoid"};
  for (size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return static_cast<GateKind>(i);
  raise({Code::kConfig, "kernels.gate",
         "unknown activation " + name + ": choose one of silu, gelu, gelu_tanh, sigmoid", "activation"});
}

void gate(const TensorView& gate_up, const TensorView& out, const std::string& activation,
          const TensorView* row_gate, ThreadPool* pool, const std::string& isa,
          const TensorView* up) {
  constexpr const char* kWhere = "kernels.gate";
  if (out.num_dims() != 2) refuse_view(kWhere, "out", out, "give [rows, size]");
  const size_t rows = out.shape(0), size = out.shape(1);
  check_rows(kWhere, "gate_up", gate_up, rows, up == nullptr ? 2 * size : size);
  check_rows(kWhere, "out", out, rows, size);
  check_same_type(kWhere, "out", out, gate_up);
  GateTask task;
  if (row_gate != nullptr) {
    check_rows(kWhere, "row_gate", *row_gate, rows, 1);
    check_same_type(kWhere, "row_gate", *row_gate, gate_up);
    task.row_gate = row_gate->data();
    task.row_gate_stride = row_gate->stride(0);
  }
  task.gate = gate_up.data();
  task.gate_stride = gate_up.stride(0);
  task.up = static_cast<const uint8_t*>(gate_up.data()) + size * float_bytes(gate_up.float_type());
  task.up_stride = gate_up.stride(0);
  if (up != nullptr) {
    check_rows(kWhere, "up", *up, rows, size);
    check_same_type(kWhere, "up", *up, gate_up);
    task.up = up->data();
    task.up_stride = up->stride(0);
  }
  task.out = out.data();
  task.out_stride = out.stride(0);
  task.type = out.float_type();
  task.num_rows = rows;
  task.size = size;
  task.kind = find_gate(activation);
  if (rows == 0 || size == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(rows * size, [&] { return run_gate(kernels, pool, task); });
}

void soft_cap(const TensorView& x, float cap, ThreadPool* pool, const std::string& isa) {
  constexpr const char* kWhere = "kernels.soft_cap";
  if (x.num_dims() != 2 || !x.is_float32()) refuse_view(kWhere, "x", x, "give float32 [rows, size]");
  const size_t rows = x.shape(0), size = x.shape(1);
  check_rows(kWhere, "x", x, rows, size);
  if (!(cap > 0.0f)) raise({Code::kConfig, kWhere, "a cap that is not positive", "cap"});
  SoftCapTask task;
  task.x = static_cast<float*>(x.data());
  task.stride = x.stride(0);
  task.num_rows = rows;
  task.size = size;
  task.cap = cap;
  if (rows == 0 || size == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(rows * size, [&] { return run_soft_cap(kernels, pool, task); });
}

Scoring find_scoring(const std::string& name) {
  constexpr std::array<const char*, 4> kNames = {"softmax", "softmax_normalised", "sigmoid",
                                                 "sigmoid_normalised"};
  for (size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return static_cast<Scoring>(i);
  raise({Code::kConfig, "kernels.route",
         "unknown scoring " + name +
             ": choose one of softmax, softmax_normalised, sigmoid, sigmoid_normalised",
         "scoring"});
}

void route(const TensorView& logits, const TensorView& weights, const TensorView& ids,
           const std::string& scoring, const TensorView* bias, size_t num_groups,
           size_t num_top_groups, float weight_scale, ThreadPool* pool, const std::string& isa,
           size_t num_group_choices) {
  constexpr const char* kWhere = "kernels.route";
  if (logits.num_dims() != 2 || !logits.is_dense_from(0) || !logits.is_float())
    refuse_view(kWhere, "logits", logits, "give a contiguous [rows, experts] of floats");
  const size_t rows = logits.shape(0), experts = logits.shape(1);
  if (weights.num_dims() != 2 || weights.shape(0) != rows || !weights.is_dense_from(0) ||
      !weights.is_float())
    refuse_view(kWhere, "weights", weights, "give a contiguous [rows, top_k] of floats");
  const size_t top_k = weights.shape(1);
  if (ids.num_dims() != 2 || ids.shape(0) != rows || ids.shape(1) != top_k ||
      !ids.is_dense_from(0) || !ids.is_int64())
    refuse_view(kWhere, "ids", ids, "give a contiguous int64 of the shape of weights");
  const bool has_groups = num_groups >= 1 && experts % num_groups == 0 && num_top_groups >= 1 &&
                          num_top_groups <= num_groups;
  if (!has_groups || experts > kMaxRouterExperts || top_k > kMaxTopK || top_k < 1 ||
      top_k > experts / num_groups * num_top_groups)
    raise({Code::kShape, kWhere,
           "top " + std::to_string(top_k) + " of " + std::to_string(experts) + " experts in " +
               std::to_string(num_top_groups) + " of " + std::to_string(num_groups) +
               " groups: give at most " + std::to_string(kMaxTopK) + " of " +
               std::to_string(kMaxRouterExperts) + ", in groups that divide them and hold enough",
           "ids"});
  if (num_group_choices != 1 && num_group_choices != 2)
    raise({Code::kConfig, kWhere,
           std::to_string(num_group_choices) + " choices of a group: give 1 or 2",
           "num_group_choices"});
  if (bias != nullptr && (bias->num_dims() != 1 || bias->shape(0) != experts ||
                          !bias->is_dense_from(0) || !bias->is_float32()))
    refuse_view(kWhere, "bias", *bias, "give float32 [experts]");
  RouterTask task;
  task.logits = logits.data();
  task.logits_type = logits.float_type();
  task.bias = bias == nullptr ? nullptr : static_cast<const float*>(bias->data());
  task.weights = weights.data();
  task.weights_type = weights.float_type();
  task.ids = static_cast<int64_t*>(ids.data());
  task.num_rows = rows;
  task.num_experts = experts;
  task.top_k = top_k;
  task.num_groups = num_groups;
  task.num_top_groups = num_top_groups;
  task.num_group_choices = num_group_choices;
  task.scoring = find_scoring(scoring);
  task.weight_scale = weight_scale;
  if (rows == 0) return;
  const RowKernels& kernels = row_kernels(isa);
  run_sized(rows * experts * 8, [&] { return run_router(kernels, pool, task); });
}

}  // namespace

void bind_row_ops(nb::module_& module) {
  nb::class_<TensorView>(module, "TensorView",
                         "A CPU tensor as the row and attention operators take it.\n\n"
                         "Converting a tensor costs as much as a small operator, so it is done\n"
                         "once. The memory is shared and kept alive.")
      .def(nb::init<TensorView::Array>(), "tensor"_a,
           nb::sig("def __init__(self, tensor: object) -> None"),
           "View a tensor of any shape, strides and type. Raises: TypeError.");
  // The defaults of optional arguments are null pointers, which stand for an absent operand.
  module.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "out"_a, "eps"_a,
             "residual"_a.none() = nb::none(), "pool"_a.none() = nb::none(), "isa"_a = "",
             "weight_offset"_a = 0.0f,
             "out = x / sqrt(mean(x^2) + eps) * (weight_offset + weight), per row of [rows, size].\n\n"
             "With `residual`, first `residual += x` in place, and the sum is normed; `x` may then\n"
             "have another type. `out` may be `x`. Bitwise the same alone and in company.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa).");
  module.def("rotate_heads", &rotate_heads, "x"_a, "cos"_a, "sin"_a, "num_q_heads"_a,
             "num_k_heads"_a, "q_weight"_a.none() = nb::none(), "k_weight"_a.none() = nb::none(),
             "eps"_a = 0.0f, "pool"_a.none() = nb::none(), "isa"_a = "", "weight_offset"_a = 0.0f,
             "Norm and rotate the first heads of `x` [rows, heads, head_dim], in place.\n\n"
             "Query heads come first, then key heads; a weight [head_dim], to which\n"
             "`weight_offset` is added, norms them, None does not. `cos` and `sin` [rows, r] rotate the first r items, halves by halves; only\n"
             "their first half is read. Raises: ShapeError; ConfigError or UnsupportedError (isa).");
  module.def("place_latents", &place_latents, "q"_a, "kv"_a, "weight"_a, "eps"_a, "cos"_a, "sin"_a,
             "out"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
             "Write what multi-head latent attention attends with, but for the absorbed parts.\n\n"
             "Args:\n"
             "    q: [rows, heads, head_dim]; the last `rotated` items of each head are read.\n"
             "    kv: [rows, rank + rotated]; rank is the size of `weight`.\n"
             "    weight: [rank], of the RMSNorm of the latent, with `eps`.\n"
             "    cos, sin: [rows, rotated]; rotate halves by halves; the first half is read.\n"
             "    out: [rows, heads + 1, rank + rotated]. Of each query only the rotated end is\n"
             "        written; behind the queries comes the key: normed latent, rotated end.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa).");
  module.def("gate", &gate, "gate_up"_a, "out"_a, "activation"_a = "silu",
             "row_gate"_a.none() = nb::none(), "pool"_a.none() = nb::none(), "isa"_a = "",
             "up"_a.none() = nb::none(),
             "out = f(gate) * up, where `gate_up` [rows, 2 * size] holds the gate first.\n\n"
             "`activation` is silu, gelu (erf), gelu_tanh or sigmoid. `row_gate` [rows, 1] multiplies\n"
             "each row by its sigmoid. With `up` [rows, size], which may be `out`, `gate_up` is the\n"
             "gate alone, [rows, size]. Raises: ShapeError; ConfigError or UnsupportedError (isa).");
  module.def("soft_cap", &soft_cap, "x"_a, "cap"_a, "pool"_a.none() = nb::none(), "isa"_a = "",
             "x = cap * tanh(x / cap), in place, on float32 [rows, size].\n\n"
             "Raises: ShapeError; ConfigError (cap, isa); UnsupportedError (isa).");
  module.def("route", &route, "logits"_a, "weights"_a, "ids"_a, "scoring"_a,
             "bias"_a.none() = nb::none(), "num_groups"_a = 1, "num_top_groups"_a = 1,
             "weight_scale"_a = 1.0f, "pool"_a.none() = nb::none(), "isa"_a = "",
             "num_group_choices"_a = 2,
             "Choose each row's top experts, best first; of equals the lower id.\n\n"
             "Args:\n"
             "    logits: [rows, experts].\n"
             "    weights: [rows, top_k], written.\n"
             "    ids: int64 [rows, top_k], written; 0, 1, ... with NaN weights for a row with NaN.\n"
             "    scoring: softmax or sigmoid, over all experts or, `_normalised`, the chosen.\n"
             "    bias: float32 [experts] added for the choice, not to the weights.\n"
             "    num_groups: equal groups of experts, of which only the `num_top_groups` with the\n"
             "        largest sum of their best choices count.\n"
             "    weight_scale: on the weights.\n"
             "    num_group_choices: how many of a group's best are summed, 1 or 2.\n"
             "Raises: ShapeError; ConfigError (scoring, isa); UnsupportedError (isa).");
}

}  // namespace tandem::bindings
