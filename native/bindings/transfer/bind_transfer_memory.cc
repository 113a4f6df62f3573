#include "bindings/transfer/bind_transfer_memory.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/transfer/bind_transfer.h"
#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
  int64_t step = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != step) return false;
    step *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

HostMemory wrap(nb::handle object) {
  HostMemory memory;
  nb::ndarray<> writable;
  memory.is_readonly = !nb::try_cast(object, writable, false);
  if (memory.is_readonly && !nb::try_cast(object, memory.owner, false)) {
    raise({Code::kUnsupported, "transfer.register",
           std::string(nb::str(object.type()).c_str()) +
               " gives neither a buffer nor DLPack memory: pass an array, tensor or memoryview",
           "buffer"});
  }
  if (!memory.is_readonly) memory.owner = nb::ndarray<nb::ro>(writable);
  if (memory.owner.device_type() != nb::device::cpu::value)
    raise({Code::kUnsupported, "transfer.register",
           "memory of device type " + std::to_string(memory.owner.device_type()) +
               ": only host memory can be registered in this build",
           "buffer"});
  if (!is_contiguous(memory.owner))
    raise({Code::kShape, "transfer.register", "a strided view: pass a contiguous one", "buffer"});
  memory.data = static_cast<uint8_t*>(const_cast<void*>(memory.owner.data()));
  memory.size = memory.owner.nbytes();
  return memory;
}

}  // namespace

void bind_transfer_memory(nb::module_& module) {
  nb::class_<HostMemory>(module, "HostMemory",
                         "The bytes of an array, tensor or buffer; keeps the object alive.")
      .def(nb::new_(&wrap), "object"_a,
           "Raises: UnsupportedError (no host memory); ShapeError (not contiguous).")
      .def_ro("size_bytes", &HostMemory::size)
      .def_ro("is_readonly", &HostMemory::is_readonly)
      .def_prop_ro("address",
                   [](const HostMemory& memory) { return reinterpret_cast<uint64_t>(memory.data); })
      .def(
          "array",
          [](nb::handle self) {
            const HostMemory& memory = nb::cast<HostMemory&>(self);
            using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;
            using ConstArray = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;
            if (memory.is_readonly) return nb::cast(ConstArray(memory.data, {memory.size}, self));
            return nb::cast(Array(memory.data, {memory.size}, self));
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "A view of the bytes, no copy; keeps the object alive.");
  nb::class_<SharedArray>(module, "SharedArray",
                          "Zeroed memory that processes of the same user on this host can map.\n\n"
                          "Freed with the last array that views it, here and there.")
      .def(nb::new_([](int64_t size_bytes, std::optional<uint64_t> reserved_bytes) {
             if (size_bytes < 0)
               raise({Code::kConfig, "transfer.allocate",
                      std::to_string(size_bytes) + " bytes: ask for at least one", "nbytes"});
             const nb::gil_scoped_release release;
             Result<std::shared_ptr<transfer::SharedMemory>> memory =
                 transfer::SharedMemory::allocate(
                     static_cast<size_t>(size_bytes),
                     reserved_bytes.value_or(static_cast<uint64_t>(size_bytes)));
             if (memory.is_ok()) return SharedArray{memory.value()};
             const nb::gil_scoped_acquire acquire;
             raise(memory.error());
           }),
           "size_bytes"_a, "reserved_bytes"_a = nb::none(),
           "Allocate.\n\n"
           "Args:\n"
           "    size_bytes: at least 1.\n"
           "    reserved_bytes: of these, from the start, that may be touched until `reserve` is\n"
           "        called; a touch beyond ends the process. None = all.\n"
           "Raises: ConfigError (size below 1); CapacityError (too large).")
      .def_prop_ro("size_bytes", [](const SharedArray& array) { return array.memory->size(); })
      .def_prop_ro("reserved_bytes",
                   [](const SharedArray& array) { return array.memory->reserved(); })
      .def(
          "reserve",
          [](const SharedArray& array, uint64_t end_bytes) {
            run_released([&] { return array.memory->reserve(end_bytes); });
          },
          "end_bytes"_a,
          "Reserve the first `end_bytes`; what was reserved stays so. Any thread.\n\n"
          "Raises: ConfigError (beyond the size); CapacityError (refused).")
      .def(
          "array",
          [](nb::handle self) {
            const SharedArray& array = nb::cast<SharedArray&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(
                array.memory->data(), {array.memory->size()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "A writable view of the bytes, no copy; keeps the memory alive.");
}

}  // namespace tandem::bindings
