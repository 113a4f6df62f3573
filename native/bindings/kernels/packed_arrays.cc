#include "bindings/kernels/packed_arrays.h"

#include <utility>

namespace tandem::bindings {
namespace {

// An array of Python's as storage; destroyed with the GIL held, like every bank.
struct ArrayStorage final : WeightStorage {
  explicit ArrayStorage(nb::object array) : owner(std::move(array)) {}
  nb::object owner;
};

bool is_fp16(const nb::dlpack::dtype& dtype) {
  return dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && dtype.bits == 16 &&
         dtype.lanes == 1;
}

}  // namespace

WeightFormat make_format(int bits, int group_size, bool has_minimum, bool is_float, int scale_bits,
                         int table, bool has_zeros) {
  if (table < 0 || table > static_cast<int>(CodeTable::kIq3S))
    raise({Code::kUnsupported, "kernels.make_format",
           "table " + std::to_string(table) + ": there are 0 to " +
               std::to_string(static_cast<int>(CodeTable::kIq3S)),
           "table"});
  return {bits, group_size, has_minimum, is_float, scale_bits, static_cast<CodeTable>(table),
          has_zeros};
}

MatrixView view_matrix(const AnyInput& array, const char* where, const char* name, size_t rows,
                       size_t columns) {
  const bool has_dtype = is_float(array.dtype()) || is_bf16(array.dtype());
  check_matrix(array, where, name, has_dtype, "float32 or bfloat16", rows, columns);
  return {array.data(), is_bf16(array.dtype()), rows, columns};
}

MatrixView view_codes(const WeightFormat& format, const nb::object& codes, const nb::object& scales,
                      const nb::object& minima, const char* where, const char* name, size_t rows,
                      size_t columns) {
  constexpr size_t kBlockRows = 128;
  if (format.bits >= 16)
    raise({Code::kUnsupported, where,
           std::string(format.bits == 16 ? "bf16" : "f32") +
               " has no codes: give the weights themselves",
           name});
  const std::string text = name;
  const auto code_array = nb::cast<AnyInput>(codes);
  check_matrix(code_array, where, name, code_array.dtype() == nb::dtype<uint8_t>(), "uint8", rows,
               columns);
  const auto size = static_cast<size_t>(format.group_size);
  const size_t groups = size == 0 ? 1 : (columns + size - 1) / size;
  const bool is_block = format.is_float && format.bits == 8 && format.group_size != 0;
  const auto scale_array = nb::cast<AnyInput>(scales);
  if (format.table == CodeTable::kE2m1) {
    check_matrix(scale_array, where, (text + ".scales").c_str(),
                 scale_array.dtype() == nb::dtype<uint8_t>(), "uint8", rows, groups);
    const auto factor_array = nb::cast<AnyInput>(minima);
    check_matrix(factor_array, where, (text + ".factors").c_str(), is_float(factor_array.dtype()),
                 "float32", rows, 1);
    MatrixView view{code_array.data(), false, rows, columns, scale_array.data()};
    view.factors = static_cast<const float*>(factor_array.data());
    return view;
  }
  check_matrix(scale_array, where, (text + ".scales").c_str(),
               format.is_float ? is_float(scale_array.dtype()) : is_fp16(scale_array.dtype()),
               format.is_float ? "float32" : "float16",
               is_block ? (rows + kBlockRows - 1) / kBlockRows : rows, groups);
  MatrixView view{code_array.data(), false, rows, columns, scale_array.data()};
  if (!format.has_minimum) return view;
  const auto minimum_array = nb::cast<AnyInput>(minima);
  check_matrix(minimum_array, where, (text + ".minima").c_str(), is_fp16(minimum_array.dtype()),
               "float16", rows, groups);
  view.minima = static_cast<const uint16_t*>(minimum_array.data());
  return view;
}

std::vector<BlockRow> list_block_rows(const BlockParts& parts, const char* where, const char* name,
                                      size_t rows, size_t columns) {
  std::vector<BlockRow> stored;
  for (const auto& [kind_name, bytes] : std::get<0>(parts)) {
    const BlockKind kind = take(find_block_kind(kind_name));
    const BlockType& type = block_type(kind);
    const auto array = nb::cast<AnyInput>(bytes);
    const size_t count = array.ndim() == 2 ? array.shape(0) : 0;
    if (columns % type.weights != 0)
      raise({Code::kShape, where,
             std::string(name) + " has " + std::to_string(columns) + " inputs, no whole blocks of " +
                 type.name,
             name});
    const size_t row_bytes = columns / type.weights * type.bytes;
    check_matrix(array, where, name, array.dtype() == nb::dtype<uint8_t>(), "uint8", count,
                 row_bytes);
    const auto* data = static_cast<const uint8_t*>(array.data());
    for (size_t row = 0; row < count; ++row) stored.push_back({data + row * row_bytes, kind});
  }
  const nb::object& order = std::get<1>(parts);
  if (!order.is_none()) {
    const auto array = nb::cast<AnyInput>(order);
    if (array.ndim() != 1 || array.dtype() != nb::dtype<int64_t>() || !is_contiguous(array) ||
        array.device_type() != nb::device::cpu::value)
      raise({Code::kShape, where,
             std::string(name) + " has the order " + describe_array(array) +
                 ": give a contiguous [rows] of int64",
             name});
    std::vector<BlockRow> chosen;
    const auto* rows_of = static_cast<const int64_t*>(array.data());
    for (size_t i = 0; i < array.shape(0); ++i) {
      // A negative row becomes, as uint64_t, larger than any row, and is refused below.
      const auto row = static_cast<uint64_t>(rows_of[i]);
      if (row >= stored.size())
        raise({Code::kShape, where,
               std::string(name) + " wants row " + std::to_string(rows_of[i]) + " of " +
                   std::to_string(stored.size()),
               name});
      chosen.push_back(stored[row]);
    }
    stored = std::move(chosen);
  }
  if (stored.size() == rows) return stored;
  raise({Code::kShape, where,
         std::string(name) + " has " + std::to_string(stored.size()) + " rows of blocks, wanted " +
             std::to_string(rows),
         name});
}

void check_block_rows(const WeightFormat& format, const std::vector<BlockRow>& rows,
                      const char* where, const char* name) {
  for (const BlockRow& row : rows)
    if (!holds_blocks(format, row.kind))
      raise({Code::kUnsupported, where,
             std::string(name) + " is of " + block_type(row.kind).name +
                 ", which the format does not hold",
             name});
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
