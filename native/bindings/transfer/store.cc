// Bindings of the store's allocator, headers, lookups and checksums.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/pages.h"
#include "bindings/status.h"
#include "store/reads/chunk_checksum.h"
#include "store/segments/extent.h"
#include "store/segments/object_header.h"
#include "store/segments/segment_allocator.h"
#include "transfer/wire/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using store::SegmentAllocator;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = std::vector<std::string_view>;

std::optional<std::vector<uint64_t>> allocate(SegmentAllocator& space,
                                              const std::vector<uint64_t>& sizes) {
  std::vector<uint64_t> offsets(sizes.size());
  if (!space.allocate(sizes.data(), sizes.size(), offsets.data())) return std::nullopt;
  return offsets;
}

// Returns the values at offsets in a memory, and refuses those that leave it.
std::vector<store::Value> locate(const Bytes& memory, const Numbers& places, const Numbers& sizes) {
  if (places.size() != sizes.size())
    raise({Code::kShape, "store.checksum", "columns of different lengths", "sizes"});
  std::vector<store::Value> found(sizes.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const uint64_t size = sizes.data()[i];
    const uint64_t at = places.data()[i];
    if (size > memory.size() || at > memory.size() - size)
      raise({Code::kShape, "store.checksum", "a value leaves the memory", "sizes"});
    found[i] = {memory.data() + at, size};
  }
  return found;
}

std::vector<uint64_t> measure_extents(const Keys& keys, const std::vector<uint64_t>& sizes) {
  if (keys.size() != sizes.size())
    raise({Code::kShape, "store.layout", "columns of different lengths", "sizes"});
  std::vector<uint64_t> lengths(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (sizes[i] > store::kMaxValueBytes)
      raise({Code::kConfig, "store.layout",
             "value of " + std::to_string(sizes[i]) + " bytes: give 0 to 2^40", "size"});
    lengths[i] = store::extent_bytes(keys[i].size(), sizes[i]);
  }
  return lengths;
}

std::vector<uint64_t> locate_values(const Keys& keys, const std::vector<uint64_t>& sizes) {
  if (keys.size() != sizes.size())
    raise({Code::kShape, "store.layout", "columns of different lengths", "sizes"});
  std::vector<uint64_t> places(keys.size());
  for (size_t i = 0; i < keys.size(); ++i)
    places[i] = store::value_offset(keys[i].size(), sizes[i]);
  return places;
}

void seal_objects(const WritableBytes& marks, const WritableBytes& data, uint64_t usable_bytes,
                  uint64_t home, const Keys& keys, const std::vector<int64_t>& offsets,
                  const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& versions,
                  const std::vector<uint64_t>& checksums, const std::vector<uint64_t>& wanted,
                  const std::vector<bool>& hard_pins, const std::vector<uint64_t>& soft_pin_ms,
                  const std::optional<nb::bytes>& tables, const std::optional<nb::bytes>& values) {
  for (const size_t size : {offsets.size(), sizes.size(), versions.size(), checksums.size(),
                            wanted.size(), hard_pins.size(), soft_pin_ms.size()}) {
    if (size != keys.size())
      raise({Code::kCorruption, "store.records", "columns of different lengths", ""});
  }
  std::vector<store::Object> objects(keys.size());
  for (size_t i = 0; i < objects.size(); ++i)
    objects[i] = {
        .key = keys[i],
        .offset = static_cast<uint64_t>(offsets[i]),
        .size = sizes[i],
        .version = versions[i],
        .checksum = checksums[i],
        .wanted = wanted[i],
        .soft_pin_ms = soft_pin_ms[i],
        .hard_pin = hard_pins[i]};
  const store::SegmentMemory segment{marks.data(), marks.size(), data.data(),
                                     std::min<uint64_t>(usable_bytes, data.size()), home};
  store::Missing missing = store::Missing::kNothing;
  std::string_view blob;
  if (values) {
    missing = store::Missing::kValues;
    blob = {values->c_str(), values->size()};
  } else if (tables) {
    missing = store::Missing::kTables;
    blob = {tables->c_str(), tables->size()};
  }
  raise_if_error([&] {
    const nb::gil_scoped_release release;
    return store::seal_objects(segment, objects, missing, blob);
  }());
}

nb::bytes pack_header(std::string_view key, uint64_t size, uint64_t version, uint32_t checksum,
                      uint8_t wanted, bool hard_pin, uint32_t soft_pin_ms, uint64_t home,
                      uint64_t position) {
  if (key.size() > store::kMaxKeyBytes || size > store::kMaxValueBytes ||
      version > store::kMaxVersion)
    raise({Code::kConfig, "store.header", "a field beyond its bits", ""});
  std::string out(store::kHeaderBytes + key.size(), '\0');
  store::write_header(reinterpret_cast<uint8_t*>(out.data()),
                      {.key = key, .size = size, .version = version, .checksum = checksum,
                       .soft_pin_ms = soft_pin_ms, .wanted = wanted, .hard_pin = hard_pin,
                       .home = home, .position = position});
  return nb::bytes(out.data(), out.size());
}

using HeaderFields = std::tuple<nb::object, uint64_t, uint64_t, uint32_t, uint8_t, bool, uint32_t>;

std::optional<HeaderFields> parse_header(const Bytes& memory, uint64_t at, uint64_t home,
                                         uint64_t position) {
  if (at > memory.size()) return std::nullopt;
  const auto header = store::read_header(memory.data() + at, memory.size() - at, home, position);
  if (!header || header->size > store::kMaxValueBytes) return std::nullopt;
  nb::object key = nb::steal(PyUnicode_DecodeUTF8(
      header->key.data(), static_cast<Py_ssize_t>(header->key.size()), nullptr));
  if (!key.is_valid()) {
    PyErr_Clear();
    return std::nullopt;
  }
  return HeaderFields{std::move(key), header->size, header->version, header->checksum,
                      header->wanted, header->hard_pin, header->soft_pin_ms};
}

using Column = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ColumnValues = std::variant<int64_t, std::vector<int64_t>>;

template <typename T>
void fill_column(const Column& column, const std::vector<size_t>& rows, const ColumnValues& values,
                 bool is_check) {
  T* const data = static_cast<T*>(column.data());
  const std::vector<int64_t>* const each = std::get_if<std::vector<int64_t>>(&values);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t value = each != nullptr ? (*each)[i] : std::get<int64_t>(values);
    if (is_check && !std::in_range<T>(value))
      raise({Code::kConfig, "store.fill_rows", std::to_string(value) + " does not fit its column",
             ""});
    if (!is_check) data[rows[i]] = static_cast<T>(value);
  }
}

void fill_any(const Column& column, const std::vector<size_t>& rows, const ColumnValues& values,
              bool is_check) {
  const nb::dlpack::dtype type = column.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.lanes == 1 && type.code == static_cast<uint8_t>(code) && type.bits == bits;
  };
  if (is(nb::dlpack::dtype_code::Int, 64)) return fill_column<int64_t>(column, rows, values, is_check);
  if (is(nb::dlpack::dtype_code::Int, 32)) return fill_column<int32_t>(column, rows, values, is_check);
  if (is(nb::dlpack::dtype_code::UInt, 32))
    return fill_column<uint32_t>(column, rows, values, is_check);
  if (is(nb::dlpack::dtype_code::UInt, 16))
    return fill_column<uint16_t>(column, rows, values, is_check);
  if (is(nb::dlpack::dtype_code::UInt, 8)) return fill_column<uint8_t>(column, rows, values, is_check);
  raise({Code::kConfig, "store.fill_rows", "a column of another type", ""});
}

void fill_rows(const std::vector<size_t>& rows,
               const std::vector<std::tuple<Column, ColumnValues>>& columns) {
  // Check all values first, so that a value that does not fit is found before any column has
  // changed.
  for (const bool is_check : {true, false}) {
    for (const auto& [column, values] : columns) {
      const auto* each = std::get_if<std::vector<int64_t>>(&values);
      if (each != nullptr && each->size() != rows.size())
        raise({Code::kShape, "store.fill_rows", "columns of different lengths", ""});
      if (is_check && std::any_of(rows.begin(), rows.end(),
                                  [&](size_t row) { return row >= column.size(); }))
        raise({Code::kShape, "store.fill_rows", "a row beyond the end", "rows"});
      fill_any(column, rows, values, is_check);
    }
  }
}

}  // namespace

void bind_store(nb::module_& module) {
  nb::class_<SegmentAllocator>(
      module, "SegmentAllocator",
      "Where objects lie in a segment. Pure: it sees offsets, never memory. Not thread-safe.")
      .def(nb::new_([](uint64_t capacity_bytes, uint64_t granule_bytes, uint64_t chunk_bytes) {
             store::AllocatorOptions options;
             options.granule_bytes = granule_bytes;
             options.chunk_bytes = chunk_bytes;
             return take(SegmentAllocator::make(capacity_bytes, options));
           }),
           "capacity_bytes"_a, nb::kw_only(), "granule_bytes"_a = 512,
           "chunk_bytes"_a = uint64_t{1} << 20,
           "Args:\n    chunk_bytes: what the runs of one size class are cut from, at most.\n"
           "Raises: ConfigError (no granule, or more than 2^30).")
      .def("allocate", &allocate, "sizes"_a,
           "Offsets of free runs of these sizes (bytes), or None and nothing is taken.")
      .def(
          "release",
          [](SegmentAllocator& space, uint64_t offset, uint64_t size_bytes) {
            raise_if_error(space.release(offset, size_bytes));
          },
          "offset"_a, "size_bytes"_a, "Raises: ConflictError if no such run is allocated.")
      .def(
          "release_many",
          [](SegmentAllocator& space, const std::vector<uint64_t>& offsets,
             const std::vector<uint64_t>& sizes) {
            if (offsets.size() != sizes.size())
              raise({Code::kShape, "store.release", "columns of different lengths", "sizes"});
            for (size_t i = 0; i < offsets.size(); ++i)
              raise_if_error(space.release(offsets[i], sizes[i]));
          },
          "offsets"_a, "sizes"_a, "As ``release`` of each; those before one that is wrong are free.")
      .def(
          "rebuild",
          [](SegmentAllocator& space, const Numbers& offsets, const Numbers& sizes) {
            if (offsets.size() != sizes.size())
              raise({Code::kShape, "store.rebuild",
                     std::to_string(offsets.size()) + " offsets, " + std::to_string(sizes.size()) +
                         " sizes",
                     "sizes"});
            raise_if_error(space.rebuild(offsets.data(), sizes.data(), offsets.size()));
          },
          "offsets"_a, "sizes"_a,
          "Forget all and take these ranges, sorted by offset.\n\n"
          "Raises: CorruptionError (overlap, beyond the end, not aligned): all is free then.")
      .def(
          "grow",
          [](SegmentAllocator& space, uint64_t capacity_bytes) {
            raise_if_error(space.grow(capacity_bytes));
          },
          "capacity_bytes"_a, "Raises: ConfigError if smaller than before.")
      .def_prop_ro("capacity_bytes", &SegmentAllocator::capacity_bytes)
      .def_prop_ro("used_bytes", &SegmentAllocator::used_bytes, "In whole granules.")
      .def_prop_ro("num_classes", &SegmentAllocator::num_classes, "Sizes that recur.")
      .def("find_largest_free_bytes", &SegmentAllocator::find_largest_free_bytes,
           "The largest request that would succeed now.");
  module.def("measure_extents", &measure_extents, "keys"_a, "sizes"_a,
             "Bytes that objects take in a segment, whole granules.\n\n"
             "Raises: ConfigError (a value beyond 2^40); TypeError (negative, or no text).");
  module.def("locate_values", &locate_values, "keys"_a, "sizes"_a,
             "Where values begin in their extents, bytes; as ``layout.value_offset``.");
  module.def(
      "seal_objects", &seal_objects, "marks"_a, "data"_a, "usable_bytes"_a, "home"_a, nb::kw_only(), "keys"_a,
      "offsets"_a, "sizes"_a, "versions"_a, "checksums"_a, "wanted"_a, "hard_pins"_a,
      "soft_pin_ms"_a, "tables"_a.none(), "values"_a.none(),
      nb::sig("def seal_objects(marks: object, data: object, usable_bytes: int, home: int, *, keys: list[str], "
              "offsets: list[int], sizes: list[int], versions: list[int], checksums: list[int], "
              "wanted: list[int], hard_pins: list[bool], soft_pin_ms: list[int], "
              "tables: bytes | None, values: bytes | None) -> None"),
      "Make all of these objects ones that survive, or none; without the GIL.\n\n"
      "Args:\n"
      "    marks: of the segment, uint8, one a granule.\n"
      "    data: its extents, uint8.\n"
      "    usable_bytes: of them.\n"
      "    home: of the segment, for its headers.\n"
      "    tables: to be written before, one after the other; None if they are there, or follow\n"
      "        from the values.\n"
      "    values: the same of values; None if they are there.\n\n"
      "Raises: ConfigError (leaves the segment); ConflictError (other objects lie there);\n"
      "CorruptionError (a checksum; the length of the blob or a column).");
  module.def("pack_header", &pack_header, "key"_a, "size"_a, "version"_a, "checksum"_a, "wanted"_a,
             "hard_pin"_a, "soft_pin_ms"_a, "home"_a, "position"_a,
             "Return the header of an object, and its key, as they are stored.\n\n"
             "Raises: ConfigError (a field beyond its bits).");
  module.def("parse_header", &parse_header, "memory"_a, "at"_a, "home"_a, "position"_a,
             nb::sig("def parse_header(memory: object, at: int, home: int, position: int) -> "
                     "tuple[str, int, int, int, int, bool, int] | None"),
             "Read the header that stands in ``memory`` from ``at`` on; the fields of\n"
             "``pack_header`` up to the pins. None if it is damaged, or belongs to another place.");
  module.def(
      "fill_rows", &fill_rows, "rows"_a, "columns"_a,
      nb::sig("def fill_rows(rows: Sequence[int], "
              "columns: Sequence[tuple[object, int | Sequence[int]]]) -> None"),
      "Write values to the same rows of many columns, in all of them or in none.\n\n"
      "Args:\n"
      "    columns: each an array of integers (int64, int32, uint32, uint16, uint8), and what its\n"
      "        rows get: one value for all, or one each.\n\n"
      "Raises: ConfigError (a value does not fit its column); ShapeError (a row beyond the end).");
  module.def(
      "populate_pages",
      [](const WritableBytes& memory) {
        const nb::gil_scoped_release release;
        return populate_pages(memory.data(), memory.size()) == 0;
      },
      "memory"_a, nb::sig("def populate_pages(memory: object) -> bool"),
      "Map the pages of some memory now, for writing, instead of one by one when they are touched;\n"
      "their contents stay. Without the GIL. False where the kernel cannot.");
  module.def(
      "crc32c",
      [](const Bytes& data, uint32_t crc) {
        const nb::gil_scoped_release release;
        return transfer::crc32c(crc, data.data(), data.size());
      },
      "data"_a, "crc"_a = 0, nb::sig("def crc32c(data: object, crc: int = 0) -> int"),
      "CRC-32C of contiguous bytes, continuing from `crc`. Without the GIL.");
  module.def(
      "checksum_chunks",
      [](const Bytes& data, size_t chunk_bytes) {
        if (chunk_bytes == 0)
          raise({Code::kConfig, "store.checksum", "chunks of 0 bytes", "chunk_bytes"});
        const size_t count = (data.size() + chunk_bytes - 1) / chunk_bytes;
        PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * 4));
        if (made == nullptr) nb::raise_python_error();
        nb::bytes result = nb::steal<nb::bytes>(made);
        // The bytes of a new Python object are aligned for any integer.
        uint32_t* sums = reinterpret_cast<uint32_t*>(const_cast<char*>(result.c_str()));
        const nb::gil_scoped_release release;
        store::checksum_chunks(data.data(), data.size(), chunk_bytes, sums);
        return result;
      },
      "data"_a, "chunk_bytes"_a, nb::sig("def checksum_chunks(data: object, chunk_bytes: int) -> bytes"),
      "CRC-32C of each chunk, as little-endian uint32; `data` is contiguous bytes. Without the GIL.");
  module.def(
      "checksum_blob",
      [](const nb::bytes& blob, const std::vector<uint64_t>& sizes, size_t chunk_bytes) {
        if (chunk_bytes == 0)
          raise({Code::kConfig, "store.checksum", "chunks of 0 bytes", "chunk_bytes"});
        const uint8_t* at = reinterpret_cast<const uint8_t*>(blob.c_str());
        uint64_t left = blob.size();
        std::vector<store::Value> values;
        values.reserve(sizes.size());
        for (const uint64_t size : sizes) {
          if (size > left)
            raise({Code::kShape, "store.checksum", "a value leaves the memory", "sizes"});
          values.push_back({at, size});
          at += size, left -= size;
        }
        std::vector<uint32_t> checksums(values.size());
        const nb::gil_scoped_release release;
        store::checksum_values(values.data(), values.size(), chunk_bytes, checksums.data(), nullptr);
        return checksums;
      },
      "blob"_a, "sizes"_a, "chunk_bytes"_a,
      nb::sig("def checksum_blob(blob: bytes, sizes: list[int], chunk_bytes: int) -> list[int]"),
      "As `checksum_values`, of values that lie one after the other; without their tables.\n\n"
      "Raises: ShapeError (a value leaves the blob).");
  module.def(
      "checksum_values",
      [](const Bytes& memory, const Numbers& places, const Numbers& sizes, size_t chunk_bytes) {
        if (chunk_bytes == 0)
          raise({Code::kConfig, "store.checksum", "chunks of 0 bytes", "chunk_bytes"});
        const std::vector<store::Value> values = locate(memory, places, sizes);
        std::vector<uint32_t> checksums(values.size());
        size_t total = 0;
        for (const store::Value& value : values)
          total += (value.size + chunk_bytes - 1) / chunk_bytes;
        PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total * 4));
        if (made == nullptr) nb::raise_python_error();
        nb::bytes tables = nb::steal<nb::bytes>(made);
        {
          // The bytes of a new Python object are aligned for any integer.
          uint32_t* out = reinterpret_cast<uint32_t*>(const_cast<char*>(tables.c_str()));
          const nb::gil_scoped_release release;
          store::checksum_values(values.data(), values.size(), chunk_bytes, checksums.data(), out);
        }
        return std::make_pair(checksums, tables);
      },
      "memory"_a, "places"_a, "sizes"_a, "chunk_bytes"_a,
      nb::sig("def checksum_values(memory: object, places: object, sizes: object, chunk_bytes: int)"
              " -> tuple[list[int], bytes]"),
      "Checksums of many values: value i is `sizes[i]` bytes of `memory` from `places[i]` (uint64).\n"
      "Without the GIL.\n\n"
      "Returns: of each the checksum of its table (0 if empty); all tables, one after the other.\n"
      "Raises: ShapeError (a value leaves the memory).");
}

}  // namespace tandem::bindings
