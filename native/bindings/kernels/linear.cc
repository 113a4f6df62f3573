#include "kernels/linear/linear.h"
#include "kernels/weights/codebooks/codebook_blocks.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/kernels/packed_arrays.h"
#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

PackedMatrix::Config make_matrix_config(const WeightFormat& format, int64_t in_features,
                                        int64_t out_features) {
  for (const int64_t size : {in_features, out_features})
    if (size < 1)
      raise({Code::kConfig, "kernels.create_linear",
             "size " + std::to_string(size) + ": give at least 1", ""});
  PackedMatrix::Config config;
  config.format = format;
  config.in_features = static_cast<size_t>(in_features);
  config.out_features = static_cast<size_t>(out_features);
  return config;
}

PackedMatrix* make_matrix(int bits, int group_size, bool has_minimum, bool is_float, int scale_bits,
                          int table, bool has_zeros, int64_t in_features, int64_t out_features,
                          const std::string& isa, nb::object storage,
                          std::vector<int> share_nodes) {
  PackedMatrix::Config config =
      make_matrix_config(make_format(bits, group_size, has_minimum, is_float, scale_bits, table, has_zeros),
                         in_features, out_features);
  config.isa = isa;
  config.share_nodes = std::move(share_nodes);
  if (!storage.is_none())
    config.storage = view_storage(std::move(storage), "kernels.create_linear");
  return new PackedMatrix(take(PackedMatrix::create(config)));
}

void pack_matrix(PackedMatrix& matrix, ThreadPool& pool, const AnyInput& weights,
                 int64_t first_row) {
  constexpr const char* kWhere = "kernels.pack";
  const size_t rows = weights.ndim() == 2 ? weights.shape(0) : matrix.out_features();
  const MatrixView view = view_matrix(weights, kWhere, "weights", rows, matrix.in_features());
  // A negative row becomes, as size_t, larger than any row, and is refused there.
  run_released([&] { return matrix.pack(pool, static_cast<size_t>(first_row), view); });
}

void pack_matrix_codes(PackedMatrix& matrix, ThreadPool& pool, const nb::object& codes,
                       const nb::object& scales, const nb::object& minima) {
  const MatrixView view = view_codes(matrix.format(), codes, scales, minima, "kernels.pack_codes",
                                     "codes", matrix.out_features(), matrix.in_features());
  run_released([&] { return matrix.pack(pool, 0, view); });
}

void pack_matrix_blocks(PackedMatrix& matrix, ThreadPool& pool, const BlockParts& blocks) {
  constexpr const char* kWhere = "kernels.pack_blocks";
  const std::vector<BlockRow> rows =
      list_block_rows(blocks, kWhere, "blocks", matrix.out_features(), matrix.in_features());
  check_block_rows(matrix.format(), rows, kWhere, "blocks");
  MatrixView view;
  view.rows = matrix.out_features();
  view.columns = matrix.in_features();
  view.block_rows = rows.data();
  run_released([&] { return matrix.pack(pool, 0, view); });
}

void decode_block_values(ThreadPool* pool, const BlockParts& blocks, const AnyOutput& out) {
  constexpr const char* kWhere = "kernels.decode_blocks";
  const size_t num_rows = out.ndim() == 2 ? out.shape(0) : 0;
  const size_t columns = out.ndim() == 2 ? out.shape(1) : 0;
  const bool has_dtype = is_float(out.dtype()) || is_bf16(out.dtype());
  check_matrix(out, kWhere, "out", has_dtype, "float32 or bfloat16", num_rows, columns);
  const std::vector<BlockRow> rows = list_block_rows(blocks, kWhere, "blocks", num_rows, columns);
  run_released([&] {
    return decode_blocks(pool, rows.data(), num_rows, columns, out.data(), is_bf16(out.dtype()));
  });
}

// Returns the columns of `out`, an array of `size` items in `num_rows` rows. A matrix writes its
// columns from `first_column` on; without `first_column` it must write all of them.
size_t count_out_columns(const PackedMatrix& matrix, const std::optional<int64_t>& first_column,
                         size_t size, size_t num_rows) {
  if (!first_column) return matrix.out_features();
  const size_t columns = num_rows == 0 ? 0 : size / num_rows;
  const bool has_room = *first_column >= 0 && columns >= matrix.out_features() &&
                        static_cast<size_t>(*first_column) <= columns - matrix.out_features();
  if (has_room || num_rows == 0) return columns;
  raise({Code::kShape, "kernels.run_linear",
         "columns from " + std::to_string(*first_column) + " of " + std::to_string(columns) +
             ": the matrix has " + std::to_string(matrix.out_features()) + " outputs",
         "first_column"});
}

void run_matrix_batch(const PackedMatrix& matrix, ThreadPool& pool, PackedMatrix::Batch batch,
                      const std::optional<int64_t>& first_column, size_t out_columns) {
  if (first_column) {
    batch.out_stride = out_columns;
    batch.out = static_cast<uint8_t*>(batch.out) +
                static_cast<size_t>(*first_column) * (batch.is_out_bf16 ? 2 : 4);
  }
  run_released([&] { return matrix.forward(pool, batch); });
}

void run_matrix_views(const PackedMatrix& matrix, ThreadPool& pool, const TensorView& x,
                      const TensorView& out, bool is_added,
                      const std::optional<int64_t>& first_column) {
  constexpr const char* kWhere = "kernels.run_linear";
  constexpr const char* kTypes = "float32 or bfloat16";
  const size_t num_rows = x.num_dims() > 0 ? x.shape(0) : 0;
  check_dense(kWhere, "x", x, num_rows, matrix.in_features(), x.is_float(), kTypes);
  const size_t columns = count_out_columns(matrix, first_column, out.array().size(), num_rows);
  check_dense(kWhere, "out", out, num_rows, columns, out.is_float(), kTypes);
  run_matrix_batch(matrix, pool,
                   {x.data(), x.is_bfloat16(), num_rows, out.data(), out.is_bfloat16(), is_added},
                   first_column, columns);
}

void run_matrix(const PackedMatrix& matrix, ThreadPool& pool, const AnyInput& x,
                const AnyOutput& out, bool is_added, const std::optional<int64_t>& first_column) {
  constexpr const char* kWhere = "kernels.run_linear";
  const size_t num_rows = x.ndim() == 2 ? x.shape(0) : 0;
  const MatrixView rows = view_matrix(x, kWhere, "x", num_rows, matrix.in_features());
  const bool has_dtype = is_float(out.dtype()) || is_bf16(out.dtype());
  const size_t columns = count_out_columns(matrix, first_column, out.size(), num_rows);
  check_matrix(out, kWhere, "out", has_dtype, "float32 or bfloat16", num_rows, columns);
  run_matrix_batch(matrix, pool,
                   {rows.data, rows.is_bf16, num_rows, out.data(), is_bf16(out.dtype()), is_added},
                   first_column, columns);
}

void take_matrix_rows(const PackedMatrix& matrix, ThreadPool& pool, const AnyInput& outputs,
                      const AnyOutput& out) {
  constexpr const char* kWhere = "kernels.take_rows";
  if (outputs.ndim() != 1 || outputs.dtype() != nb::dtype<int64_t>() || !is_contiguous(outputs) ||
      outputs.device_type() != nb::device::cpu::value)
    raise({Code::kShape, kWhere,
           "outputs are " + describe_array(outputs) + ": give contiguous int64 on the CPU",
           "outputs"});
  const bool has_dtype = is_float(out.dtype()) || is_bf16(out.dtype());
  check_matrix(out, kWhere, "out", has_dtype, "float32 or bfloat16", outputs.shape(0),
               matrix.in_features());
  run_released([&] {
    return matrix.take_rows(pool, static_cast<const int64_t*>(outputs.data()), outputs.shape(0),
                            out.data(), is_bf16(out.dtype()));
  });
}

void run_matrix_back(const PackedMatrix& matrix, ThreadPool& pool, const AnyInput& d_out,
                     const AnyOutput& d_x, bool is_added) {
  constexpr const char* kWhere = "kernels.linear_backward";
  const size_t num_rows = d_out.ndim() == 2 ? d_out.shape(0) : 0;
  const MatrixView rows = view_matrix(d_out, kWhere, "d_out", num_rows, matrix.out_features());
  check_matrix(d_x, kWhere, "d_x", is_float(d_x.dtype()), "float32", num_rows,
               matrix.in_features());
  run_released([&] {
    return matrix.backward(
        pool, {rows.data, rows.is_bf16, num_rows, static_cast<float*>(d_x.data()), is_added});
  });
}

void run_heads_views(const PackedMatrix& matrix, ThreadPool& pool, const TensorView& x,
                     const TensorView& out) {
  constexpr const char* kWhere = "kernels.run_heads";
  if (x.num_dims() != 3 || !x.is_float() || !x.is_dense_from(2) ||
      x.shape(2) != matrix.in_features())
    refuse_view(kWhere, "x", x,
                "give [rows, heads, " + std::to_string(matrix.in_features()) +
                    "] of float32 or bfloat16 with dense heads");
  PackedMatrix::HeadsBatch batch;
  batch.num_rows = x.shape(0);
  batch.num_heads = x.shape(1);
  const size_t num_panels = count_panels(matrix.out_features());
  const size_t share = batch.num_heads == 0 ? 0 : num_panels / batch.num_heads * kPanelColumns;
  if (out.num_dims() != 3 || !out.is_float() || !out.is_dense_from(2) ||
      out.shape(0) != batch.num_rows || out.shape(1) != batch.num_heads || share == 0 ||
      num_panels % batch.num_heads != 0 || out.shape(2) > share ||
      out.shape(2) + kPanelColumns <= share ||
      (batch.num_heads > 1 && matrix.out_features() % kPanelColumns != 0))
    refuse_view(kWhere, "out", out,
                "give [rows, heads, columns] of float32 or bfloat16 with dense heads: as many rows "
                "and heads as x, which share " +
                    std::to_string(matrix.out_features()) + " outputs in whole panels of " +
                    std::to_string(kPanelColumns));
  batch.x = x.data();
  batch.is_bf16 = x.is_bfloat16();
  batch.x_stride = x.stride(0);
  batch.x_head_stride = x.stride(1);
  batch.out = out.data();
  batch.is_out_bf16 = out.is_bfloat16();
  batch.head_columns = out.shape(2);
  batch.out_stride = out.stride(0);
  batch.out_head_stride = out.stride(1);
  run_released([&] { return matrix.forward_heads(pool, batch); });
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def(
      "count_linear_bytes",
      [](int bits, int group_size, bool has_minimum, bool is_float, int scale_bits, int table, bool has_zeros,
         int64_t in_features, int64_t out_features) {
        return take(PackedMatrix::count_bytes(
            make_matrix_config(make_format(bits, group_size, has_minimum, is_float, scale_bits, table, has_zeros),
                               in_features, out_features)));
      },
      nb::kw_only(), "bits"_a, "group_size"_a, "has_minimum"_a, "is_float"_a, "scale_bits"_a = 0,
      "table"_a = 0, "has_zeros"_a = false, "in_features"_a,
      "out_features"_a, "Bytes that a `PackedMatrix` of these sizes takes.\n\nRaises: as "
                        "`PackedMatrix`.");
  module.def("decode_blocks", &decode_block_values, "pool"_a.none(), "blocks"_a, "out"_a,
             nb::sig("def decode_blocks(pool: ThreadPool | None, blocks: tuple[list[tuple[str, "
                     "object]], object | None], out: object) -> None"),
             "Write the values of blocks to `out`, float32 or bfloat16 [rows, inputs], contiguous.\n"
             "Products are in float32, as llama.cpp has them, rounded once. Without a pool in this\n"
             "thread.\n\n"
             "Raises: ShapeError; UnsupportedError (a kind that is not known).");
  module.def(
      "list_codebook",
      [](const std::string& kind) {
        const std::vector<uint8_t> book = list_codebook(take(find_block_kind(kind)));
        return nb::bytes(book.data(), book.size());
      },
      "kind"_a,
      "Magnitudes plus 128, a byte each, of the entries of a type's codebook; empty without one.\n\n"
      "Raises: UnsupportedError (a kind that is not known).");
  nb::class_<PackedMatrix>(module, "PackedMatrix",
                           "One matrix with packed weights; `tandem.kernels.cpu.linear` is its "
                           "face.\n\nCalls release the GIL.")
      .def(nb::new_(&make_matrix), nb::kw_only(), "bits"_a, "group_size"_a, "has_minimum"_a,
           "is_float"_a, "scale_bits"_a = 0, "table"_a = 0, "has_zeros"_a = false, "in_features"_a, "out_features"_a, "isa"_a = "", "storage"_a = nb::none(),
           "share_nodes"_a = std::vector<int>(),
           "Reserve the memory, where weights are zero until packed, or take `storage`: uint8,\n"
           "`count_linear_bytes` of them, 64-byte aligned; read-only ones cannot be packed.\n"
           "`share_nodes` are the NUMA nodes that equal shares of the outputs should lie on.\n\n"
           "Raises: UnsupportedError (format, ISA); ShapeError (not whole groups); ConfigError\n"
           "    (unknown ISA, a size below 1, nodes for storage); CapacityError (memory);\n"
           "    NotFoundError (node).")
      .def_prop_ro("is_bound", &PackedMatrix::is_bound,
                   "Whether the kernel granted every share its NUMA node.")
      .def("find_share_nodes",
           [](const PackedMatrix& matrix) { return take(matrix.find_share_nodes()); },
           "NUMA node of a page of each share, once weights are packed.\n\n"
           "Raises: UnsupportedError (the kernel does not say).")
      .def_prop_ro("isa",
                   [](const PackedMatrix& matrix) { return std::string(isa_name(matrix.isa())); })
      .def_prop_ro("size_bytes", &PackedMatrix::size_bytes, "Packed bytes, scales included.")
      .def("pack_codes", &pack_matrix_codes, "pool"_a, "codes"_a, "scales"_a, "minima"_a.none(),
           nb::sig("def pack_codes(self, pool: ThreadPool, codes: object, scales: object, minima: "
                   "object | None) -> None"),
           "Lay out the codes of all rows; see `tandem.kernels.weights.formats.QuantizedMatrix`.\n\n"
           "Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (what is no\n"
           "    code of the format, or a scale that is not finite).")
      .def("pack_blocks", &pack_matrix_blocks, "pool"_a, "blocks"_a,
           nb::sig("def pack_blocks(self, pool: ThreadPool, blocks: tuple[list[tuple[str, object]], "
                   "object | None]) -> None"),
           "Lay out the blocks of all rows; see `tandem.kernels.weights.blocks.BlockMatrix`.\n\n"
           "Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (a kind that the\n"
           "    format does not hold, or a scale that is not finite in it).")
      .def("pack", &pack_matrix, "pool"_a, "weights"_a, "first_row"_a = 0,
           nb::sig("def pack(self, pool: ThreadPool, weights: object, first_row: int = 0) -> None"),
           "Code rows of the matrix from `first_row` on, whole blocks of 128 or up to the last."
           "\n\n"
           "Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (weights that\n"
           "    the format cannot hold).")
      .def(
          "set_bias",
          [](PackedMatrix& matrix, const AnyInput& bias) {
            matrix.set_bias(view_vector(bias, "kernels.set_bias", "bias", matrix.out_features()));
          },
          "bias"_a, nb::sig("def set_bias(self, bias: object) -> None"),
          "Copy the bias, a float32 vector.\n\nRaises: ShapeError.")
      .def("forward", &run_matrix_views, "pool"_a, "x"_a, "out"_a, "is_added"_a = false,
           "first_column"_a = nb::none(),
           "As below, with tensors that were viewed before; leading dimensions count as one row.")
      .def("forward", &run_matrix, "pool"_a, "x"_a, "out"_a, "is_added"_a = false,
           "first_column"_a = nb::none(),
           nb::sig("def forward(self, pool: ThreadPool, x: object, out: object, "
                   "is_added: bool = False, first_column: int | None = None) -> None"),
           "Write x W^T + bias to `out`, or add it to what `out` holds.\n"
           "With `first_column` to the columns of a wider `out` from there on.\n\n"
           "Raises: ShapeError (`out` is then untouched).")
      .def("backward", &run_matrix_back, "pool"_a, "d_out"_a, "d_x"_a, "is_added"_a = false,
           nb::sig("def backward(self, pool: ThreadPool, d_out: object, d_x: object, "
                   "is_added: bool = False) -> None"),
           "Write d_out W, the gradient with respect to x, to `d_x`, float32, or add it.\n\n"
           "Raises: ShapeError (`d_x` is then untouched).")
      .def("forward_heads", &run_heads_views, "pool"_a, "x"_a, "out"_a,
           "out[t, h] = x[t, h] W_h^T, where W_h is the h-th of equal shares of the outputs.\n\n"
           "Args:\n"
           "    pool: threads.\n"
           "    x: [rows, heads, in_features]; any strides of rows and heads.\n"
           "    out: [rows, heads, columns], written; a share is `columns` in whole panels of 64.\n"
           "The matrix has no bias. Raises: ShapeError (`out` is then untouched).")
      .def(
          "unpack",
          [](const PackedMatrix& matrix, ThreadPool& pool, const AnyOutput& out) {
            check_matrix(out, "kernels.unpack", "out", is_float(out.dtype()), "float32",
                         matrix.out_features(), matrix.in_features());
            run_released([&] { return matrix.unpack(pool, static_cast<float*>(out.data())); });
          },
          "pool"_a, "out"_a, nb::sig("def unpack(self, pool: ThreadPool, out: object) -> None"),
          "Write the weights as numbers to `out`, float32 [out_features, in_features].\n\n"
          "Raises: ShapeError.")
      .def("take_rows", &take_matrix_rows, "pool"_a, "outputs"_a, "out"_a,
           nb::sig("def take_rows(self, pool: ThreadPool, outputs: object, out: object) -> None"),
           "Write the weights of `outputs`, int64, as numbers to `out`, float32 or bfloat16\n"
           "[outputs, inputs].\n\nRaises: ShapeError (also for an output that is not there).")
      .def(
          "read_weights",
          [](const PackedMatrix& matrix, ThreadPool& pool) {
            run_released([&] { return matrix.read_weights(pool); });
          },
          "pool"_a, "Read the packed bytes: a ceiling for benchmarks.")
      .def(
          "multiply_registers",
          [](const PackedMatrix& matrix, ThreadPool& pool, uint64_t num_macs) {
            run_released([&] { return matrix.multiply_registers(pool, num_macs); });
          },
          "pool"_a, "num_macs"_a,
          "Perform as many multiply-adds as the format's unit can: a ceiling for benchmarks.")
      .def(
          "array",
          [](nb::handle self) {
            const PackedMatrix& matrix = nb::cast<const PackedMatrix&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(
                matrix.data(), {matrix.size_bytes()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "The packed bytes, no copy; keeps the memory alive.");
}

}  // namespace tandem::bindings
