#include "bindings/transfer/bytes_pool.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

char* data_of(const nb::bytes& value) { return const_cast<char*>(value.c_str()); }

nb::bytes make_bytes(uint64_t size) {
  PyObject* made = size > PY_SSIZE_T_MAX
                       ? PyErr_NoMemory()
                       : PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (made == nullptr) nb::raise_python_error();
  return nb::steal<nb::bytes>(made);
}

// CPython stores the hash of a bytes object directly before its bytes. This is not part of the
// stable ABI, so that it is tested.
bool has_hash_before_bytes() {
#if defined(Py_GIL_DISABLED)
  return false;
#else
  const nb::bytes probe = make_bytes(16);
  std::memcpy(data_of(probe), "sixteen bytes ..", 16);
  Py_hash_t before, after;
  std::memcpy(&before, data_of(probe) - sizeof before, sizeof before);
  const Py_hash_t hash = PyObject_Hash(probe.ptr());
  std::memcpy(&after, data_of(probe) - sizeof after, sizeof after);
  return before == -1 && after == hash;
#endif
}

bool can_refill() {
  static const bool can = has_hash_before_bytes();
  return can;
}

void forget_hash(const nb::bytes& value) {
  constexpr Py_hash_t kNone = -1;
  std::memcpy(data_of(value) - sizeof kNone, &kNone, sizeof kNone);
}

}  // namespace

BytesPool::BytesPool(uint64_t limit_bytes) : limit_bytes_(can_refill() ? limit_bytes : 0) {}

std::vector<nb::bytes> BytesPool::take(const std::vector<uint64_t>& sizes) {
  ++num_calls_;
  std::map<uint64_t, std::vector<nb::bytes>> free;
  std::vector<nb::bytes> taken;
  taken.reserve(sizes.size());
  for (const uint64_t size : sizes) {
    auto [found, is_new] = free.try_emplace(size);
    if (is_new) {
      if (const auto bucket = buckets_.find(size); bucket != buckets_.end()) {
        std::deque<nb::bytes> in_use;
        for (nb::bytes& value : bucket->second.values)
          (Py_REFCNT(value.ptr()) == 1 ? static_cast<void>(found->second.push_back(std::move(value)))
                                       : static_cast<void>(in_use.push_back(std::move(value))));
        bucket->second.values = std::move(in_use);
        bucket->second.used_at = num_calls_;
        kept_bytes_ -= size * found->second.size();
      }
    }
    if (found->second.empty()) {
      taken.push_back(make_bytes(size));
      continue;
    }
    forget_hash(found->second.back());
    taken.push_back(std::move(found->second.back()));
    found->second.pop_back();
  }
  for (auto& [size, values] : free)
    for (nb::bytes& value : values) {
      buckets_[size].values.push_back(std::move(value));
      kept_bytes_ += size;
    }
  return taken;
}

void BytesPool::keep(const std::vector<nb::bytes>& values) {
  ++num_calls_;
  for (const nb::bytes& value : values) {
    const uint64_t size = value.size();
    if (size == 0 || size > limit_bytes_) continue;
    Bucket& bucket = buckets_[size];
    bucket.values.push_back(value);
    bucket.used_at = num_calls_;
    kept_bytes_ += size;
  }
  shrink();
}

// Drop the sizes that were asked for longest ago first, and of each size the oldest object.
void BytesPool::shrink() {
  while (kept_bytes_ > limit_bytes_) {
    const auto oldest =
        std::min_element(buckets_.begin(), buckets_.end(), [](const auto& a, const auto& b) {
          return a.second.used_at < b.second.used_at;
        });
    if (!oldest->second.values.empty()) {
      oldest->second.values.pop_front();
      kept_bytes_ -= oldest->first;
    }
    if (oldest->second.values.empty()) buckets_.erase(oldest);
  }
}

void BytesPool::clear() {
  buckets_.clear();
  kept_bytes_ = 0;
}

void bind_bytes_pool(nb::module_& module) {
  nb::class_<BytesPool>(module, "BytesPool",
                        "Memory of large results: ``bytes`` that are filled again when nobody else\n"
                        "has them any more. Fresh memory costs more to touch than a copy does.")
      .def(nb::init<uint64_t>(), "limit_bytes"_a)
      .def("take", &BytesPool::take, "sizes"_a,
           "Objects of these sizes; what is in them is anything. The caller fills them (see\n"
           "``view_new_bytes``) before anybody else sees them.")
      .def("keep", &BytesPool::keep, "values"_a,
           "Note objects that were taken and filled, for another time; the oldest are forgotten.")
      .def("clear", &BytesPool::clear, "Forget all.")
      .def_prop_ro("kept_bytes", &BytesPool::kept_bytes, "Of all that are noted, in use or not.");
  module.def(
      "view_new_bytes",
      [](const nb::bytes& value) {
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(
            data_of(value), {value.size()}, value);
      },
      "value"_a, nb::sig("def view_new_bytes(value: bytes) -> numpy.typing.NDArray[numpy.uint8]"),
      "A writable view of what ``BytesPool.take`` has given, for him who fills it. Gone before the\n"
      "object is shown to anybody.");
}

}  // namespace tandem::bindings
