#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "base/aligned_buffer.h"
#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {

void bind_buffer(nb::module_& module) {
  nb::enum_<PageKind>(module, "PageKind", "What a buffer stands on, best first.")
      .value("HUGETLB", PageKind::kHugetlb, "Preallocated 2 MiB pages.")
      .value("TRANSPARENT", PageKind::kTransparent,
             "2 MiB pages requested; the kernel grants them as it can.")
      .value("BASE", PageKind::kBase, "Ordinary pages.");
  nb::class_<AlignedBuffer>(module, "AlignedBuffer",
                            "Zeroed, page-aligned memory; freed with the last array that views it.")
      .def(nb::new_([](int64_t size_bytes, bool hugepages, std::optional<int> numa_node) {
             // Refuse a negative size here, with its value: it would wrap to a huge one.
             if (size_bytes < 0)
               raise({Code::kConfig, "buffer.allocate",
                      std::to_string(size_bytes) + " bytes: ask for at least one byte",
                      "size_bytes"});
             return take(AlignedBuffer::allocate(static_cast<size_t>(size_bytes),
                                                 {hugepages, numa_node}));
           }),
           "size_bytes"_a, nb::kw_only(), "hugepages"_a = false, "numa_node"_a = nb::none(),
           "Allocate.\n\n"
           "Args:\n"
           "    size_bytes: at least 1.\n"
           "    hugepages: try preallocated huge pages, then transparent, then ordinary ones.\n"
           "    numa_node: the node to prefer.\n"
           "Raises: ConfigError (size below 1); CapacityError (too large); NotFoundError (node).")
      .def_prop_ro("size_bytes", &AlignedBuffer::size_bytes)
      .def_prop_ro("capacity_bytes", &AlignedBuffer::capacity_bytes,
                   "Whole pages taken from the machine.")
      .def_prop_ro("page_kind", &AlignedBuffer::page_kind)
      .def_prop_ro("reserved_bytes", &AlignedBuffer::reserved_bytes,
                   "Bytes from the start whose pages are taken, so that no touch can fail.")
      .def(
          "reserve",
          [](AlignedBuffer& buffer, uint64_t end_bytes) {
            run_released([&] { return buffer.reserve(end_bytes); });
          },
          "end_bytes"_a,
          "Take the pages of the first `end_bytes` now; what was taken stays.\n\n"
          "One thread at a time. Raises: ConfigError (beyond the size); CapacityError (refused).")
      .def(
          "array",
          [](nb::handle self) {
            AlignedBuffer& buffer = nb::cast<AlignedBuffer&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(
                buffer.data(), {buffer.size_bytes()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "A writable view of the bytes, no copy; keeps the memory alive.");
}

}  // namespace tandem::bindings
