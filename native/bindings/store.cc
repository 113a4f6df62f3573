// The store's deciders and checksums.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/status.h"
#include "store/chunk_checksum.h"
#include "store/segment_allocator.h"
#include "transfer/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using store::SegmentAllocator;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::optional<std::vector<uint64_t>> allocate(SegmentAllocator& space,
                                              const std::vector<uint64_t>& sizes) {
  std::vector<uint64_t> offsets(sizes.size());
  if (!space.allocate(sizes.data(), sizes.size(), offsets.data())) return std::nullopt;
  return offsets;
}

// Finds values in a memory, refusing what leaves it.
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
        // The bytes of a new object are aligned for any integer.
        uint32_t* sums = reinterpret_cast<uint32_t*>(const_cast<char*>(result.c_str()));
        const nb::gil_scoped_release release;
        store::checksum_chunks(data.data(), data.size(), chunk_bytes, sums);
        return result;
      },
      "data"_a, "chunk_bytes"_a, nb::sig("def checksum_chunks(data: object, chunk_bytes: int) -> bytes"),
      "CRC-32C of each chunk, as little-endian uint32; `data` is contiguous bytes. Without the GIL.");
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
          // The bytes of a new object are aligned for any integer.
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
