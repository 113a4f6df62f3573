#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/kernels/packed_arrays.h"
#include "base/machine/cpu_features.h"
#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/experts/experts.h"
#include "kernels/vectors/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

Activation make_activation(const std::string& name, float alpha, float limit, float up_offset) {
  constexpr std::array<std::string_view, 3> kNames = {"silu", "gelu", "gelu_tanh"};
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == name) return {static_cast<ActivationKind>(i), alpha, limit, up_offset};
  raise({Code::kConfig, "kernels.create_experts",
         "activation " + name + ": choose one of silu, gelu, gelu_tanh", "activation"});
}

// The fields of a weight format, in their order in the struct.
using FormatFields = std::tuple<int, int, bool, bool, int, int, bool>;

ExpertBank::Config make_config(const WeightFormat& format,
                               const std::optional<FormatFields>& down_format, int64_t num_experts,
                               int64_t hidden_size, int64_t intermediate_size) {
  for (const int64_t size : {num_experts, hidden_size, intermediate_size})
    if (size < 1)
      raise({Code::kConfig, "kernels.create_experts",
             "size " + std::to_string(size) + ": give at least 1", ""});
  ExpertBank::Config config;
  config.format = format;
  if (down_format)
    config.down_format = std::apply(make_format, *down_format);
  config.num_experts = static_cast<size_t>(num_experts);
  config.hidden_size = static_cast<size_t>(hidden_size);
  config.intermediate_size = static_cast<size_t>(intermediate_size);
  return config;
}

ExpertBank* make_bank(int bits, int group_size, bool has_minimum, int64_t num_experts,
                      int64_t hidden_size, int64_t intermediate_size, const std::string& isa,
                      nb::object storage, bool is_float, int scale_bits, int table, bool has_zeros,
                      const std::string& activation, float alpha, float limit, float up_offset,
                      bool has_bias, int64_t num_parts, std::vector<int> part_nodes,
                      const std::optional<FormatFields>& down_format, bool is_apart) {
  ExpertBank::Config config =
      make_config(make_format(bits, group_size, has_minimum, is_float, scale_bits, table, has_zeros), down_format,
                  num_experts, hidden_size, intermediate_size);
  config.isa = isa;
  config.activation = make_activation(activation, alpha, limit, up_offset);
  config.has_bias = has_bias;
  // A negative number becomes, as size_t, larger than any allowed number of parts, and is refused
  // there.
  config.num_parts = static_cast<size_t>(num_parts);
  config.part_nodes = std::move(part_nodes);
  config.is_apart = is_apart;
  if (!storage.is_none())
    config.storage = view_storage(std::move(storage), "kernels.create_experts");
  return new ExpertBank(take(ExpertBank::create(config)));
}

void pack(ExpertBank& bank, ThreadPool& pool, int64_t expert_id, const AnyInput& gate,
          const AnyInput& up, const AnyInput& down) {
  constexpr const char* kWhere = "kernels.pack";
  const auto view = [&](const AnyInput& array, const char* name, size_t rows, size_t columns) {
    return view_matrix(array, kWhere, name, rows, columns);
  };
  const MatrixView gate_view = view(gate, "gate", bank.intermediate_size(), bank.hidden_size());
  const MatrixView up_view = view(up, "up", bank.intermediate_size(), bank.hidden_size());
  const MatrixView down_view = view(down, "down", bank.hidden_size(), bank.intermediate_size());
  // A negative id becomes, as size_t, larger than any expert's id, and is refused there.
  const auto id = static_cast<size_t>(expert_id);
  run_released([&] { return bank.pack(pool, id, gate_view, up_view, down_view); });
}

// The arrays of a quantized matrix: codes, scales and minima.
using Codes = std::tuple<nb::object, nb::object, nb::object>;

void pack_codes(ExpertBank& bank, ThreadPool& pool, int64_t expert_id, const Codes& gate,
                const Codes& up, const Codes& down) {
  const auto view = [&](const WeightFormat& format, const Codes& codes, const char* name,
                        size_t rows, size_t columns) {
    return view_codes(format, std::get<0>(codes), std::get<1>(codes), std::get<2>(codes),
                      "kernels.pack_codes", name, rows, columns);
  };
  const size_t inner = bank.intermediate_size(), hidden = bank.hidden_size();
  const MatrixView gate_view = view(bank.format(), gate, "gate", inner, hidden);
  const MatrixView up_view = view(bank.format(), up, "up", inner, hidden);
  const MatrixView down_view = view(bank.down_format(), down, "down", hidden, inner);
  const auto id = static_cast<size_t>(expert_id);
  run_released([&] { return bank.pack(pool, id, gate_view, up_view, down_view); });
}

void pack_blocks(ExpertBank& bank, ThreadPool& pool, int64_t expert_id, const BlockParts& gate,
                 const BlockParts& up, const BlockParts& down) {
  constexpr const char* kWhere = "kernels.pack_blocks";
  std::vector<BlockRow> rows[3];
  const auto view = [&](const WeightFormat& format, std::vector<BlockRow>& own,
                        const BlockParts& parts, const char* name, size_t num_rows,
                        size_t columns) {
    own = list_block_rows(parts, kWhere, name, num_rows, columns);
    check_block_rows(format, own, kWhere, name);
    MatrixView matrix;
    matrix.rows = num_rows;
    matrix.columns = columns;
    matrix.block_rows = own.data();
    return matrix;
  };
  const size_t inner = bank.intermediate_size(), hidden = bank.hidden_size();
  const MatrixView gate_view = view(bank.format(), rows[0], gate, "gate", inner, hidden);
  const MatrixView up_view = view(bank.format(), rows[1], up, "up", inner, hidden);
  const MatrixView down_view = view(bank.down_format(), rows[2], down, "down", hidden, inner);
  const auto id = static_cast<size_t>(expert_id);
  run_released([&] { return bank.pack(pool, id, gate_view, up_view, down_view); });
}

void load(ExpertBank& bank, ThreadPool& pool, nb::object packed) {
  const std::shared_ptr<const WeightStorage> view = view_storage(std::move(packed), "kernels.load");
  run_released([&] { return bank.load(pool, view->data, view->size_bytes); });
}

void set_bias(ExpertBank& bank, int64_t expert_id, const AnyInput& gate, const AnyInput& up,
              const AnyInput& down) {
  constexpr const char* kWhere = "kernels.set_bias";
  raise_if_error(
      bank.set_bias(static_cast<size_t>(expert_id),
                    view_vector(gate, kWhere, "gate", bank.intermediate_size()),
                    view_vector(up, kWhere, "up", bank.intermediate_size()),
                    view_vector(down, kWhere, "down", bank.hidden_size())));
}

void run_expert_batch(const ExpertBank& bank, ThreadPool& pool, const ExpertBank::Batch& batch) {
  run_released([&] { return bank.forward(pool, batch); });
}

ExpertBank::Batch view_expert_batch(const ExpertBank& bank, const TensorView& x,
                                    const TensorView& ids, const TensorView& weights,
                                    const TensorView& out) {
  constexpr const char* kWhere = "kernels.run_experts";
  const size_t num_tokens = x.num_dims() > 0 ? x.shape(0) : 0;
  const size_t top_k = ids.num_dims() == 2 ? ids.shape(1) : 0;
  const size_t hidden = bank.hidden_size();
  check_dense(kWhere, "x", x, num_tokens, hidden, x.is_float(), "float32 or bfloat16");
  check_dense(kWhere, "expert_ids", ids, num_tokens, top_k, ids.is_int64(), "int64");
  check_dense(kWhere, "weights", weights, num_tokens, top_k, weights.is_float32(), "float32");
  check_dense(kWhere, "out", out, num_tokens, hidden, out.is_float32(), "float32");
  return {
      .x = x.data(),
      .is_bf16 = x.is_bfloat16(),
      .num_tokens = num_tokens,
      .expert_ids = ids.data(),
      .has_int64_ids = true,
      .top_k = top_k,
      .weights = static_cast<const float*>(weights.data()),
      .out = static_cast<float*>(out.data())};
}

void run_expert_views(const ExpertBank& bank, ThreadPool& pool, const TensorView& x,
                      const TensorView& ids, const TensorView& weights, const TensorView& out) {
  run_expert_batch(bank, pool, view_expert_batch(bank, x, ids, weights, out));
}

using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void run_apart(const ExpertBank& bank, ThreadPool& pool, const TensorView& x,
               const TensorView& ids, const TensorView& weights, const TensorView& out,
               const Memory& memory, const Places& places, size_t first_expert, size_t end_expert,
               bool is_added) {
  constexpr const char* kWhere = "kernels.run_experts";
  ExpertBank::Batch batch = view_expert_batch(bank, x, ids, weights, out);
  if (places.shape(0) != bank.num_experts())
    raise({Code::kShape, kWhere,
           std::to_string(places.shape(0)) + " places: give one for each of " +
               std::to_string(bank.num_experts()) + " experts", "places"});
  std::vector<const uint8_t*> addresses(bank.num_experts(), nullptr);
  const auto num_bytes = static_cast<int64_t>(memory.shape(0));
  const auto expert_bytes = static_cast<int64_t>(bank.expert_bytes());
  for (size_t e = 0; e < addresses.size(); ++e) {
    const int64_t place = places.data()[e];
    if (place < 0) continue;
    const uint8_t* address = memory.data() + place;
    if (expert_bytes > num_bytes || place > num_bytes - expert_bytes ||
        reinterpret_cast<uintptr_t>(address) % 64 != 0)
      raise({Code::kShape, kWhere,
             "expert " + std::to_string(e) + " at byte " + std::to_string(place) + " of " +
                 std::to_string(num_bytes) + ": give an aligned place that holds it", "places"});
    addresses[e] = address;
  }
  batch.addresses = addresses.data();
  batch.first_expert = first_expert;
  batch.end_expert = end_expert;
  batch.is_added = is_added;
  run_expert_batch(bank, pool, batch);
}

// Counts the (token, expert) pairs whose expert this bank has; wrong ids are found later.
size_t count_pairs(const AnyInput& ids, bool has_int64) {
  const size_t size = ids.shape(0) * ids.shape(1);
  size_t count = 0;
  for (size_t i = 0; i < size; ++i)
    count += has_int64 ? static_cast<const int64_t*>(ids.data())[i] >= 0
                       : static_cast<const int32_t*>(ids.data())[i] >= 0;
  return count;
}

// True if gate and up and their gradients are kept in bf16, false for fp32.
bool keeps_bf16(const ExpertBank& bank) { return bank.format().bits != 32; }

// Returns the data of an array [rows, columns] of float32 or bfloat16; null for None.
template <class Array, class Item>
Item* view_rows(const nb::object& array, const char* where, const char* name, bool has_bf16,
                size_t rows, size_t columns) {
  if (array.is_none()) return nullptr;
  const auto view = nb::cast<Array>(array);
  const bool has_dtype = has_bf16 ? is_bf16(view.dtype()) : is_float(view.dtype());
  check_matrix(view, where, name, has_dtype, has_bf16 ? "bfloat16" : "float32", rows, columns);
  return static_cast<Item*>(view.data());
}

void forward(const ExpertBank& bank, ThreadPool& pool, const AnyInput& x, const AnyInput& ids,
             const AnyInput& weights, const AnyOutput& out, const nb::object& delta,
             const nb::object& kept) {
  constexpr const char* kWhere = "kernels.run_experts";
  if (x.ndim() != 2 || ids.ndim() != 2)
    raise({Code::kShape, kWhere,
           "x is " + describe_array(x) + ", expert_ids " + describe_array(ids) +
               ": give [tokens, hidden] and [tokens, top_k]",
           "x"});
  const size_t num_tokens = x.shape(0), top_k = ids.shape(1);
  const bool has_int64 = ids.dtype() == nb::dtype<int64_t>();
  check_matrix(x, kWhere, "x", is_float(x.dtype()) || is_bf16(x.dtype()), "float32 or bfloat16",
               num_tokens, bank.hidden_size());
  check_matrix(ids, kWhere, "expert_ids", has_int64 || ids.dtype() == nb::dtype<int32_t>(),
               "int32 or int64", num_tokens, top_k);
  check_matrix(weights, kWhere, "weights", is_float(weights.dtype()), "float32", num_tokens, top_k);
  check_matrix(out, kWhere, "out", is_float(out.dtype()), "float32", num_tokens,
               bank.hidden_size());
  ExpertBank::Batch batch{
      .x = x.data(),
      .is_bf16 = is_bf16(x.dtype()),
      .num_tokens = num_tokens,
      .expert_ids = ids.data(),
      .has_int64_ids = has_int64,
      .top_k = top_k,
      .weights = static_cast<const float*>(weights.data()),
      .out = static_cast<float*>(out.data())};
  if (!delta.is_none() || !kept.is_none()) {
    const size_t pairs = count_pairs(ids, has_int64), columns = 2 * bank.inner_columns();
    batch.delta = view_rows<AnyInput, const float>(delta, kWhere, "delta", false, pairs, columns);
    batch.kept = view_rows<AnyOutput, void>(kept, kWhere, "kept", keeps_bf16(bank), pairs, columns);
  }
  run_expert_batch(bank, pool, batch);
}

void backward(const ExpertBank& bank, ThreadPool& pool, const nb::object& x, const AnyInput& ids,
              const AnyInput& weights, const AnyInput& d_out, const AnyOutput& d_x,
              const AnyOutput& d_weights, const nb::object& kept, const nb::object& delta,
              const nb::object& extra, const nb::object& d_gate_up) {
  constexpr const char* kWhere = "kernels.experts_backward";
  const size_t num_tokens = d_out.ndim() == 2 ? d_out.shape(0) : 0;
  const size_t top_k = ids.ndim() == 2 ? ids.shape(1) : 0;
  const size_t hidden = bank.hidden_size();
  const bool has_int64 = ids.dtype() == nb::dtype<int64_t>();
  ExpertBank::GradBatch batch;
  if (x.is_none() && kept.is_none())
    raise({Code::kShape, kWhere, "neither x nor kept: give what forward() had, or left", "x"});
  if (!x.is_none()) {
    const MatrixView rows = view_matrix(nb::cast<AnyInput>(x), kWhere, "x", num_tokens, hidden);
    batch.x = rows.data;
    batch.is_bf16 = rows.is_bf16;
  }
  check_matrix(ids, kWhere, "expert_ids", has_int64 || ids.dtype() == nb::dtype<int32_t>(),
               "int32 or int64", num_tokens, top_k);
  check_matrix(weights, kWhere, "weights", is_float(weights.dtype()), "float32", num_tokens, top_k);
  const MatrixView d_rows = view_matrix(d_out, kWhere, "d_out", num_tokens, hidden);
  check_matrix(d_x, kWhere, "d_x", is_float(d_x.dtype()), "float32", num_tokens, hidden);
  check_matrix(d_weights, kWhere, "d_weights", is_float(d_weights.dtype()), "float32", num_tokens,
               top_k);
  const size_t pairs = count_pairs(ids, has_int64), columns = bank.inner_columns();
  batch.num_tokens = num_tokens;
  batch.expert_ids = ids.data();
  batch.has_int64_ids = has_int64;
  batch.top_k = top_k;
  batch.weights = static_cast<const float*>(weights.data());
  batch.d_out = d_rows.data;
  batch.is_d_out_bf16 = d_rows.is_bf16;
  batch.kept =
      view_rows<AnyInput, const void>(kept, kWhere, "kept", keeps_bf16(bank), pairs, 2 * columns);
  batch.delta = view_rows<AnyInput, const float>(delta, kWhere, "delta", false, pairs, 2 * columns);
  batch.extra = view_rows<AnyInput, const float>(extra, kWhere, "extra", false, pairs, columns);
  batch.d_gate_up =
      view_rows<AnyOutput, void>(d_gate_up, kWhere, "d_gate_up", keeps_bf16(bank), pairs, 2 * columns);
  batch.d_x = static_cast<float*>(d_x.data());
  batch.d_weights = static_cast<float*>(d_weights.data());
  run_released([&] { return bank.backward(pool, batch); });
}

void read_weights(const ExpertBank& bank, ThreadPool& pool, int64_t num_experts) {
  if (num_experts < 0 || num_experts > static_cast<int64_t>(bank.num_experts()))
    raise({Code::kNotFound, "kernels.read_weights",
           std::to_string(num_experts) + " of " + std::to_string(bank.num_experts()) + " experts",
           "num_experts"});
  run_released([&] { return bank.read_weights(pool, static_cast<size_t>(num_experts)); });
}

void multiply_registers(const ExpertBank& bank, ThreadPool& pool, uint64_t num_macs) {
  run_released([&] { return bank.multiply_registers(pool, num_macs); });
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def(
      "cap_isa",
      [](const std::string& isa) {
        raise_if_error(cap_cpu_features(isa));
        take(choose_isa(isa));
      },
      "isa"_a,
      "Use no kernels, and report no CPU features, above an instruction set; before the first use.\n\n"
      "Args:\n    isa: `plain`, `avx2`, `avx512_bw`, `avx512_vnni`, `avx512_bf16` or `amx`.\n\n"
      "Raises: ConfigError (unknown); UnsupportedError (neither of this machine nor of this build);\n"
      "    ConflictError (features were read under another cap).");
  module.def(
      "kernel_isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Variants of the kernels that this machine can run, ascending; the last is the default,\n"
      "or the one before `amx`, which has to be named.");
  module.def(
      "count_expert_bytes",
      [](int bits, int group_size, bool has_minimum, int64_t num_experts, int64_t hidden_size,
         int64_t intermediate_size, bool is_float, int scale_bits, int table, bool has_zeros,
         const std::optional<FormatFields>& down_format) {
        return take(ExpertBank::count_bytes(
            make_config(make_format(bits, group_size, has_minimum, is_float, scale_bits, table, has_zeros),
                        down_format, num_experts, hidden_size, intermediate_size)));
      },
      nb::kw_only(), "bits"_a, "group_size"_a, "has_minimum"_a, "num_experts"_a, "hidden_size"_a,
      "intermediate_size"_a, "is_float"_a = false, "scale_bits"_a = 0, "table"_a = 0, "has_zeros"_a = false,
      "down_format"_a = nb::none(),
      "Bytes that an `ExpertBank` of these sizes takes.\n\nRaises: as `ExpertBank`.");
  nb::class_<ExpertBank>(module, "ExpertBank",
                         "Packed gated experts of one layer; `tandem.kernels.cpu.experts` is "
                         "their face.\n\nCalls release the GIL.")
      .def(nb::new_(&make_bank), nb::kw_only(), "bits"_a, "group_size"_a, "has_minimum"_a,
           "num_experts"_a, "hidden_size"_a, "intermediate_size"_a, "isa"_a = "",
           "storage"_a = nb::none(), "is_float"_a = false, "scale_bits"_a = 0,
           "table"_a = 0, "has_zeros"_a = false, "activation"_a = "silu",
           "alpha"_a = 1.0f, "limit"_a = std::numeric_limits<float>::infinity(),
           "up_offset"_a = 0.0f, "has_bias"_a = false, "num_parts"_a = 1,
           "part_nodes"_a = std::vector<int>(), "down_format"_a = nb::none(), "is_apart"_a = false,
           "Reserve the memory, where weights are zero until packed, or take `storage`: uint8,\n"
           "`count_expert_bytes` of them, 64-byte aligned; read-only ones cannot be packed.\n"
           "`part_nodes` are the NUMA nodes that the parts' own memory should lie on.\n"
           "`down_format` has the fields of another integer format for the down projections.\n"
           "`is_apart`: no memory; `forward_apart` is told where weights are.\n\n"
           "Raises: UnsupportedError (format, ISA, storage for several parts); ShapeError (not\n"
           "    whole groups); ConfigError (unknown ISA or activation, a size below 1, more parts\n"
           "    than column blocks, nodes for another number of parts); CapacityError (memory);\n"
           "    NotFoundError (no such node for this process).")
      .def_prop_ro("isa", [](const ExpertBank& bank) { return std::string(isa_name(bank.isa())); })
      .def_prop_ro("expert_bytes", &ExpertBank::expert_bytes,
                   "Packed bytes of one expert, scales included.")
      // State the signature by hand: any DLPack array is taken, while the generated signature would
      // say numpy only.
      .def("pack_codes", &pack_codes, "pool"_a, "expert_id"_a, "gate"_a, "up"_a, "down"_a,
           nb::sig("def pack_codes(self, pool: ThreadPool, expert_id: int, gate: tuple[object, "
                   "object, object | None], up: tuple[object, object, object | None], down: "
                   "tuple[object, object, object | None]) -> None"),
           "Lay out the codes of one expert: of each matrix codes, scales and minima; see\n"
           "`tandem.kernels.weights.formats.QuantizedMatrix`.\n\n"
           "Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);\n"
           "    UnsupportedError (what is no code of the format, or a scale that is not finite).")
      .def("pack_blocks", &pack_blocks, "pool"_a, "expert_id"_a, "gate"_a, "up"_a, "down"_a,
           nb::sig("def pack_blocks(self, pool: ThreadPool, expert_id: int, gate: "
                   "tuple[list[tuple[str, object]], object | None], up: tuple[list[tuple[str, "
                   "object]], object | None], down: tuple[list[tuple[str, object]], object | None]) "
                   "-> None"),
           "Lay out one expert that is blocks; see `tandem.kernels.weights.blocks.BlockMatrix`.\n\n"
           "Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);\n"
           "    UnsupportedError (a kind that the format does not hold, or a scale that is not\n"
           "    finite in it).")
      .def("pack", &pack, "pool"_a, "expert_id"_a, "gate"_a, "up"_a, "down"_a,
           nb::sig("def pack(self, pool: ThreadPool, expert_id: int, gate: object, up: object, "
                   "down: object) -> None"),
           "Code one expert: gate and up [intermediate, hidden], down [hidden, intermediate].\n\n"
           "Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);\n"
           "    UnsupportedError (weights that the format cannot hold).")
      .def_prop_ro("num_parts", &ExpertBank::num_parts, "Shares of the intermediate dimension.")
      .def_prop_ro("inner_columns", &ExpertBank::inner_columns,
                   "Columns of gate and up in whole blocks.")
      .def_prop_ro("is_bound", &ExpertBank::is_bound,
                   "Whether the kernel granted every part the node that was asked for.")
      .def("find_part_nodes",
           [](const ExpertBank& bank) { return take(bank.find_part_nodes()); },
           "The NUMA node of each part's first page, once it is packed.\n\n"
           "Raises: UnsupportedError (the kernel does not say).")
      .def("load", &load, "pool"_a, "packed"_a,
           nb::sig("def load(self, pool: ThreadPool, packed: object) -> None"),
           "Copy what a bank of one part packed, uint8, into these parts.\n\n"
           "Raises: ShapeError (size); ConflictError (read-only storage).")
      .def("set_bias", &set_bias, "expert_id"_a, "gate"_a, "up"_a, "down"_a,
           nb::sig("def set_bias(self, expert_id: int, gate: object, up: object, down: object"
                   ") -> None"),
           "Copy the biases of one expert, float32 vectors.\n\n"
           "Raises: ShapeError; NotFoundError (expert); ConflictError (made without biases).")
      .def("forward", &run_expert_views, "pool"_a, "x"_a, "expert_ids"_a, "weights"_a, "out"_a,
           "As below, with tensors that were viewed before; ids are int64.")
      .def("forward", &forward, "pool"_a, "x"_a, "expert_ids"_a, "weights"_a, "out"_a,
           "delta"_a = nb::none(), "kept"_a = nb::none(),
           nb::sig("def forward(self, pool: ThreadPool, x: object, expert_ids: object, "
                   "weights: object, out: object, delta: object = None, kept: object = None"
                   ") -> None"),
           "Write each token's weighted sum over its experts to `out`, float32 [tokens, hidden]."
           "\n\n"
           "`delta`, float32 [pairs, 2 * inner_columns], is added to gate and up of each token and\n"
           "expert, sorted by expert; `kept`, bfloat16, takes what their activation sees.\n\n"
           "Raises: ShapeError (array or expert id; `out` is then untouched).")
      .def("forward_apart", &run_apart, "pool"_a, "x"_a, "expert_ids"_a, "weights"_a, "out"_a,
           "memory"_a, "places"_a, "first_expert"_a, "end_expert"_a, "is_added"_a,
           "As `forward` with views, of a bank that is apart.\n\n"
           "Args:\n"
           "    pool, x, expert_ids, weights, out: as of `forward`.\n"
           "    memory: holds packed experts.\n"
           "    places: of each expert, its offset in the memory, or -1.\n"
           "    first_expert: ids below add nothing.\n"
           "    end_expert: ids from here on add nothing.\n"
           "    is_added: add to `out`; over ascending ranges the sum is bitwise that of one call.\n\n"
           "Raises: ShapeError (array, expert id or place); ConflictError (an expert without a\n"
           "    place). `out` is then untouched.")
      .def("backward", &backward, "pool"_a, "x"_a.none(), "expert_ids"_a, "weights"_a, "d_out"_a,
           "d_x"_a, "d_weights"_a, "kept"_a = nb::none(), "delta"_a = nb::none(),
           "extra"_a = nb::none(), "d_gate_up"_a = nb::none(),
           nb::sig("def backward(self, pool: ThreadPool, x: object, expert_ids: object, "
                   "weights: object, d_out: object, d_x: object, d_weights: object, "
                   "kept: object = None, delta: object = None, extra: object = None, "
                   "d_gate_up: object = None) -> None"),
           "Write the gradients with respect to `x` and `weights`, float32.\n\n"
           "`kept` and `delta` are as of `forward`; without `kept`, gate and up are computed again\n"
           "from `x`. `extra`, float32 [pairs, inner_columns], is added to the weighted gradient of\n"
           "the intermediate; `d_gate_up`, bfloat16 [pairs, 2 * inner_columns], takes those of gate\n"
           "and up.\n\n"
           "Raises: ShapeError (array or expert id; outputs are then untouched).")
      .def("read_weights", &read_weights, "pool"_a, "num_experts"_a,
           "Read the packed bytes of the first experts: a ceiling for benchmarks.\n\n"
           "Raises: NotFoundError (more than there are).")
      .def("multiply_registers", &multiply_registers, "pool"_a, "num_macs"_a,
           "Perform as many multiply-adds as the format's unit can: a ceiling for benchmarks.")
      .def(
          "array",
          [](nb::handle self) {
            const ExpertBank& bank = nb::cast<const ExpertBank&>(self);
            if (bank.num_parts() > 1 || bank.is_apart())
              raise({Code::kUnsupported, "kernels.view_packed",
                     "the packed bytes of several parts do not lie together: use one part",
                     "num_parts"});
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>, nb::c_contig>(
                bank.data(), {bank.num_experts(), bank.expert_bytes()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "The packed bytes of each expert, no copy; keeps the memory alive.\n\n"
          "Raises: UnsupportedError (several parts).");
}

}  // namespace tandem::bindings
