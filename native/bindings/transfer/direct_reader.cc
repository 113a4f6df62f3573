// Bindings of reads past the page cache, into memory that Python views.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "bindings/status.h"
#include "bindings/transfer/bind_transfer.h"
#include "transfer/files/direct_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using transfer::FileBackend;

struct ReaderStop {
  void operator()(transfer::DirectReader* reader) const {
    transfer::DirectReader::stop(std::unique_ptr<transfer::DirectReader>(reader));
  }
};

struct BoundReader {
  std::unique_ptr<transfer::DirectReader, ReaderStop> core;
};

FileBackend find_backend(const std::string& name) {
  if (name == "auto") return FileBackend::kAuto;
  if (name == "io_uring") return FileBackend::kIoUring;
  if (name == "threads") return FileBackend::kThreads;
  raise({Code::kConfig, "transfer.create_reader",
         "backend " + name + ": choose one of auto, io_uring, threads", "backend"});
}

}  // namespace

void bind_direct_reader(nb::module_& module) {
  nb::class_<BoundReader>(
      module, "DirectReader",
      "Reads ranges of files past the page cache, many at a time, into memory of its own.\n\n"
      "The place of a read must not be reused before the read is over, even if its caller gave up.\n"
      "Thread-safe; calls that wait release the GIL.")
      .def(nb::new_([](uint64_t memory_bytes, uint32_t depth, uint64_t part_bytes,
                       const std::string& backend) {
             return new BoundReader{decltype(BoundReader::core)(
                 take(transfer::DirectReader::create(
                          {memory_bytes, find_backend(backend), depth, part_bytes}))
                     .release())};
           }),
           "memory_bytes"_a, nb::kw_only(), "depth"_a = 16, "part_bytes"_a = uint64_t{512 << 10},
           "backend"_a = "auto",
           "Reserve the memory; pages are taken as reads write to them.\n\n"
           "Args:\n"
           "    memory_bytes: of all places together.\n"
           "    depth: operations that the kernel has at a time.\n"
           "    part_bytes: of one operation, a multiple of ALIGNMENT.\n"
           "    backend: `auto`, `io_uring` or `threads`.\n\n"
           "Raises: ConfigError; CapacityError (memory, threads); UnsupportedError (io_uring).")
      .def_ro_static("ALIGNMENT", &transfer::DirectReader::kAlignment,
                     "Places, and the ranges that are read, are whole multiples of it.")
      .def_static("count_span", &transfer::DirectReader::span_bytes, "offset"_a, "length"_a,
                  "Bytes of the place that a read of a range needs; its first byte comes to\n"
                  "offset % ALIGNMENT of it.")
      .def(
          "add_file",
          [](BoundReader& self, const std::string& path, bool may_change) {
            return take(self.core->add_file(path, may_change));
          },
          "path"_a, "may_change"_a = false,
          "Open a file and return its number.\n\n"
          "Args:\n"
          "    path: of the file, whose length stays.\n"
          "    may_change: True if its contents may be written while it is read, by an owner who\n"
          "        does not read a range while it writes it.\n\n"
          "Raises: NotFoundError; PermissionDeniedError; CapacityError; ConfigError (no regular\n"
          "    file, no bytes).")
      .def(
          "begin",
          [](BoundReader& self, size_t file, uint64_t offset, uint64_t length, uint64_t at) {
            const nb::gil_scoped_release release;
            Result<uint64_t> read = self.core->begin(file, offset, length, at);
            if (read.is_ok()) return read.value();
            const nb::gil_scoped_acquire acquire;
            raise(read.error());
          },
          "file"_a, "offset"_a, "length"_a, "at"_a,
          "Begin to read a range to the place `at`, an aligned offset of the memory; return the\n"
          "read's number.\n\n"
          "Raises: NotFoundError (file); ConfigError (beyond the file or the memory, not aligned).")
      .def(
          "is_done",
          [](BoundReader& self, uint64_t read) {
            const nb::gil_scoped_release release;
            return self.core->is_done(read);
          },
          "read"_a, "Return True if `finish` would not wait; hands over what was begun.")
      .def(
          "finish",
          [](BoundReader& self, uint64_t read, int timeout_ms) {
            run_released([&] { return self.core->finish(read, timeout_ms); });
          },
          "read"_a, "timeout_ms"_a,
          "Wait for a read; its number is then unknown.\n\n"
          "Raises: CorruptionError (the file ends too soon, or was written since it was added,\n"
          "    unless it may change); InternalError (the disk fails); NotFoundError (no such read);\n"
          "    DeadlineError (the read goes on, and can be waited for again).")
      .def("direct_refusal",
           [](BoundReader& self, size_t file) { return take(self.core->direct_refusal(file)); },
           "file"_a, "Return why a file is read through the page cache; empty where it is not.")
      .def_prop_ro("backend",
                   [](const BoundReader& self) {
                     return std::string(self.core->has_ring() ? "io_uring" : "threads");
                   })
      .def_prop_ro("bytes_read", [](const BoundReader& self) { return self.core->bytes_read(); },
                   "Bytes that all reads so far brought.")
      .def(
          "array",
          [](nb::handle self) {
            BoundReader& reader = nb::cast<BoundReader&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(
                reader.core->memory(), {reader.core->memory_bytes()}, self);
          },
          nb::sig("def array(self) -> numpy.typing.NDArray[numpy.uint8]"),
          "The memory, no copy; keeps it alive.");
}

}  // namespace tandem::bindings
