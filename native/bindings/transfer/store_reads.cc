// Bindings of batches of reads, and of a client's location cache.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/status.h"
#include "store/reads/batch_read.h"
#include "store/reads/locate.h"
#include "store/reads/location_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using store::LocationCache;
using Scratch = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Host number, endpoint number, and the address at which its segment begins.
using HostRow = std::tuple<int64_t, int64_t, uint64_t>;
using Target = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A native BatchRead with the Python keys whose characters it borrows.
struct BatchRead {
  nb::tuple keys;
  store::BatchRead core;
  uint64_t scratch_bytes = 0;
  uint64_t memory_bytes = 0;

  BatchRead(nb::tuple keys, uint64_t direct_bytes)
      : keys(keys), core(view(keys), direct_bytes) {}

  static std::vector<std::string_view> view(const nb::tuple& keys) {
    std::vector<std::string_view> views;
    if (!nb::try_cast(keys, views)) throw nb::type_error("keys are strings that UTF-8 can write");
    return views;
  }

  const uint8_t* check_scratch(const Scratch& scratch) const {
    if (scratch.size() < scratch_bytes)
      raise({Code::kShape, "store.get",
             std::to_string(scratch.size()) + " bytes of scratch memory, need " +
                 std::to_string(scratch_bytes), "scratch"});
    return scratch.data();
  }
  uint8_t* check_memory(const Target& memory) const {
    if (memory.size() != memory_bytes)
      raise({Code::kShape, "store.get", "other memory than the targets were given for", "memory"});
    return memory.data();
  }
};

void aim(BatchRead& self, const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& rooms,
         uint64_t memory_bytes) {
  if (offsets.size() != self.core.num_keys() || rooms.size() != offsets.size())
    raise({Code::kShape, "store.get", "columns of different lengths", "offsets"});
  std::vector<store::ReadTarget> targets(offsets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (rooms[i] > memory_bytes || offsets[i] > memory_bytes - rooms[i])
      raise({Code::kShape, "store.get", "a target leaves the memory", "rooms"});
    targets[i] = {offsets[i], rooms[i]};
  }
  self.memory_bytes = memory_bytes;
  self.core.aim(std::move(targets));
}

void place(BatchRead& self, const std::vector<uint32_t>& asked, const nb::bytes& columns,
           const nb::bytes& versions, const std::vector<HostRow>& hosts,
           double lease_end_s, LocationCache& cache, uint64_t generation) {
  const size_t count = asked.size();
  for (const uint32_t index : asked)
    if (index >= self.core.num_keys())
      raise({Code::kShape, "store.get", "no key " + std::to_string(index), "asked"});
  const bool has_versions = versions.size() == 8 * count;
  if (columns.size() != 32 * count || (versions.size() != 0 && !has_versions))
    raise({Code::kCorruption, "store.get",
           std::to_string(columns.size()) + " and " + std::to_string(versions.size()) +
               " bytes of columns for " + std::to_string(count) + " keys", ""});
  // The bytes of a Python object are aligned for any integer.
  const auto* numbers = reinterpret_cast<const int64_t*>(columns.c_str());
  const auto* version_numbers =
      has_versions ? reinterpret_cast<const int64_t*>(versions.c_str()) : nullptr;
  std::map<int64_t, store::ReadBase> bases;
  for (const auto& [host, endpoint, base] : hosts) bases[host] = {endpoint, base};
  raise_if_error(self.core.place(asked, numbers, version_numbers, bases, lease_end_s, cache,
                                 generation));
}

nb::tuple plan(BatchRead& self, int64_t endpoint) {
  const store::ReadPlan made = self.core.plan(endpoint);
  self.scratch_bytes = made.scratch_bytes;
  nb::list pieces, direct;
  for (const auto& [local, remote, length] : made.pieces)
    pieces.append(nb::make_tuple(local, remote, length));
  for (const auto& [index, remote, length] : made.direct)
    direct.append(nb::make_tuple(index, remote, length));
  return nb::make_tuple(made.scratch_bytes, made.lease_end_s, pieces, direct);
}

void check_values(BatchRead& self, const Scratch& scratch, const std::optional<Target>& memory) {
  const uint8_t* from = self.check_scratch(scratch);
  const uint8_t* to = memory ? self.check_memory(*memory) : nullptr;
  const nb::gil_scoped_release release;
  self.core.check_values(from, to);
}

void set_item(nb::list& items, uint32_t index, nb::object value) {
  if (PyList_SetItem(items.ptr(), static_cast<Py_ssize_t>(index), value.release().ptr()) != 0)
    nb::raise_python_error();
}

std::vector<uint32_t> finish(BatchRead& self, nb::list values, const Scratch& scratch, double now_s,
                             LocationCache& cache) {
  const auto* from = reinterpret_cast<const char*>(self.check_scratch(scratch));
  std::vector<uint32_t> direct;
  for (const uint32_t index : self.core.finish(now_s, cache, true)) {
    if (self.core.is_direct(index)) {
      direct.push_back(index);
    } else {
      set_item(values, index,
               nb::bytes(from + self.core.scratch_at(index), self.core.size_of(index)));
    }
  }
  return direct;
}

void finish_into(BatchRead& self, nb::list sizes, const Scratch& scratch, const Target& memory,
                 double now_s, LocationCache& cache) {
  const uint8_t* from = self.check_scratch(scratch);
  uint8_t* to = self.check_memory(memory);
  for (const uint32_t index : self.core.finish(now_s, cache, true)) {
    if (!self.core.is_direct(index)) self.core.copy_to_target(index, from, to);
    set_item(sizes, index, nb::int_(self.core.size_of(index)));
  }
}

template <class T>
using ReadColumn = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using WrittenColumn = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes to_column(const std::vector<int64_t>& numbers) {
  return nb::bytes(numbers.data(), 8 * numbers.size());
}

nb::tuple locate_rows(const std::vector<int64_t>& rows, const nb::bytes& is_here, int64_t until_ms,
                      int64_t last_tick, const ReadColumn<int64_t>& sizes,
                      const ReadColumn<int64_t>& versions, const ReadColumn<uint32_t>& checksums,
                      const WrittenColumn<int64_t>& lease_until_ms,
                      const WrittenColumn<int64_t>& used_ticks, const ReadColumn<uint8_t>& num_disks,
                      const ReadColumn<int32_t>& first_copy, const ReadColumn<uint16_t>& copy_hosts,
                      const ReadColumn<int64_t>& copy_offsets, const ReadColumn<int32_t>& next_copy) {
  for (const size_t size : {versions.size(), checksums.size(), lease_until_ms.size(),
                            used_ticks.size(), num_disks.size(), first_copy.size()})
    if (size != sizes.size())
      raise({Code::kShape, "store.locate", "columns of different lengths", "sizes"});
  if (copy_offsets.size() != copy_hosts.size() || next_copy.size() != copy_hosts.size())
    raise({Code::kShape, "store.locate", "columns of different lengths", "copy_hosts"});
  const store::DirectoryColumns directory{
      .num_rows = sizes.size(),
      .sizes = sizes.data(),
      .versions = versions.data(),
      .checksums = checksums.data(),
      .lease_until_ms = lease_until_ms.data(),
      .used_ticks = used_ticks.data(),
      .num_disks = num_disks.data(),
      .first_copy = first_copy.data(),
      .num_copies = copy_hosts.size(),
      .copy_hosts = copy_hosts.data(),
      .copy_offsets = copy_offsets.data(),
      .next_copy = next_copy.data()};
  const std::vector<uint8_t> flags(is_here.c_str(), is_here.c_str() + is_here.size());
  const store::LocatedRows located =
      take(store::locate_rows(directory, rows, flags, until_ms, last_tick));
  nb::list reads;
  for (const auto& [host, num_bytes, count] : located.reads)
    reads.append(nb::make_tuple(host, num_bytes, count));
  return nb::make_tuple(to_column(located.columns), to_column(located.versions), located.undecided,
                        reads);
}

}  // namespace

void bind_store_reads(nb::module_& module) {
  nb::class_<LocationCache>(
      module, "LocationCache",
      "Where objects lay when their master was last asked, while their leases hold. Bounded: what\n"
      "was noted longest ago goes first. Guarded by the GIL.")
      .def(nb::init<size_t>(), "max_locations"_a)
      .def("__len__", &LocationCache::size)
      .def_prop_ro("generation", &LocationCache::generation, "How often it was cleared.")
      .def("forget",
           [](LocationCache& self, const std::vector<std::string_view>& keys) {
             if (self.size() == 0) return;
             for (const std::string_view key : keys) self.forget(key);
           }, "keys"_a)
      .def("forget_endpoint", &LocationCache::forget_endpoint, "endpoint"_a)
      .def("clear", &LocationCache::clear, "Forget all, and what is being asked for just now.");
  nb::class_<BatchRead>(
      module, "BatchRead",
      "The arithmetic of one request for many whole objects; see native/store/reads/batch_read.h. Places\n"
      "are found in a cache or told by a master, then read endpoint by endpoint: `plan`, the checks,\n"
      "`finish`.")
      .def("__init__",
           [](BatchRead* self, nb::object keys, uint64_t direct_bytes) {
             new (self) BatchRead(nb::tuple(keys), direct_bytes);
           },
           "keys"_a, "direct_bytes"_a,
           nb::sig("def __init__(self, keys: collections.abc.Sequence[str], direct_bytes: int) -> None"),
           "Values of `direct_bytes` or more are read to where they shall be, not by scratch memory.")
      .def("aim", &aim, "offsets"_a, "rooms"_a, "memory_bytes"_a,
           "Where values shall be in a memory of so many bytes, and how much room each has.\n\n"
           "Raises: ShapeError (a target leaves the memory).")
      .def("place_known",
           [](BatchRead& self, const LocationCache& cache, double now_s) {
             return self.core.place_known(cache, now_s);
           }, "cache"_a, "now_s"_a, "Place what is remembered; how many.")
      .def("list_unplaced", [](const BatchRead& self) { return self.core.list_unplaced(); },
           "Indexes of the keys that their master is to be asked for.")
      .def("place", &place, "asked"_a, "columns"_a, "versions"_a, "hosts"_a, "lease_end_s"_a,
           "cache"_a, "generation"_a,
           "Take the answer for these keys; what is not simple is given up.\n\n"
           "Args:\n"
           "    columns: int64 of all keys: sizes, checksums, hosts, offsets.\n"
           "    versions: int64; empty where the master tells none, so that nothing is remembered.\n"
           "    hosts: number in the columns, of the endpoint, and where its segment begins.\n"
           "    generation: of the cache, when the master was asked.\n\n"
           "Raises: CorruptionError (numbers that no object has; the length of a column).")
      .def("take_given_up", [](BatchRead& self) { return self.core.take_given_up(); },
           "Indexes of what has been given up since the last time: these are done, unless they are\n"
           "placed anew.")
      .def("list_endpoints", [](const BatchRead& self) { return self.core.list_endpoints(); },
           "Those with something to read.")
      .def("plan", &plan, "endpoint"_a,
           nb::sig("def plan(self, endpoint: int) -> tuple[int, float, list[tuple[int, int, int]], "
                   "list[tuple[int, int, int]]]"),
           "What to read of an endpoint.\n\n"
           "Returns: bytes of scratch memory; when the first of the leases ends; pieces (offset in\n"
           "the scratch memory, address there, length); direct values (index, address, length).")
      .def("check_headers",
           [](BatchRead& self, const Scratch& scratch) {
             self.core.check_headers(self.check_scratch(scratch));
           }, "scratch"_a, nb::sig("def check_headers(self, scratch: object) -> None"),
           "Drop what was remembered and is that version of that object no more.")
      .def("check_values", &check_values, "scratch"_a, "memory"_a.none(),
           nb::sig("def check_values(self, scratch: object, memory: object | None) -> None"),
           "Drop what differs from its checksum, without the GIL. Direct values are looked at in\n"
           "`memory`, if there is one; else see `check_direct`.")
      .def("check_direct",
           [](BatchRead& self, uint32_t index, uint32_t checksum) {
             if (index >= self.core.num_keys())
               raise({Code::kShape, "store.get", "no key " + std::to_string(index), "index"});
             self.core.check_direct(index, checksum);
           }, "index"_a, "checksum"_a, "Drop a direct value if its checksum is not this one.")
      .def("finish", &finish, "values"_a, "scratch"_a, "now_s"_a, "cache"_a,
           nb::sig("def finish(self, values: list[bytes | None], scratch: object, now_s: float, "
                   "cache: LocationCache) -> list[int]"),
           "Set the values that are good and whose leases hold; forget the places of the others.\n\n"
           "Returns: the direct ones among the good, whose values are the caller's to set.")
      .def("finish_into", &finish_into, "sizes"_a, "scratch"_a, "memory"_a, "now_s"_a, "cache"_a,
           nb::sig("def finish_into(self, sizes: list[int], scratch: object, memory: object, "
                   "now_s: float, cache: LocationCache) -> None"),
           "As `finish`: copy values to their targets, and set their sizes.")
      .def("fail",
           [](BatchRead& self, LocationCache& cache) { self.core.finish(0, cache, false); },
           "cache"_a, "Nothing of the plan came.");
  module.def("locate_rows", &locate_rows, "rows"_a, "is_here"_a, "until_ms"_a, "last_tick"_a,
             "sizes"_a, "versions"_a, "checksums"_a, "lease_until_ms"_a, "used_ticks"_a,
             "num_disks"_a, "first_copy"_a, "copy_hosts"_a, "copy_offsets"_a, "next_copy"_a,
             nb::sig("def locate_rows(rows: list[int], is_here: bytes, until_ms: int, "
                     "last_tick: int, sizes: object, versions: object, checksums: object, "
                     "lease_until_ms: object, used_ticks: object, num_disks: object, "
                     "first_copy: object, copy_hosts: object, copy_offsets: object, "
                     "next_copy: object) -> tuple[bytes, bytes, list[int], "
                     "list[tuple[int, int, int]]]"),
             "One pass over the columns of a directory: find the only copy of each row (-1: none),\n"
             "lease it until then, note a use.\n\n"
             "Args:\n"
             "    is_here: a byte for each host: 1 if it can be read from.\n\n"
             "Returns: sizes, checksums, hosts and offsets, int64, one after the other, -1 where\n"
             "there is none; versions; indexes of rows with several copies, or one on a disk, whose\n"
             "host is not chosen; of each host its number, the bytes it is read for, and how many.");
}

}  // namespace tandem::bindings
