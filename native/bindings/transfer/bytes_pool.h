// A pool of bytes objects for large results, which are reused once nobody else refers to them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

namespace tandem::bindings {

// A pool of bytes objects. Touching new memory costs more than a copy, so the memory of a dropped
// value is kept. An object whose only reference is the pool's is invisible to others, so it may be
// filled again if its cached hash is reset. Where that is impossible (another object layout, no
// GIL) nothing is kept. All calls need the GIL.
class BytesPool {
 public:
  explicit BytesPool(uint64_t limit_bytes);

  // Returns objects of these sizes with undefined bytes, which the caller fills before it passes
  // them on.
  std::vector<nanobind::bytes> take(const std::vector<uint64_t>& sizes);
  // Remembers objects that were filled; others may refer to them for any time.
  void keep(const std::vector<nanobind::bytes>& values);
  void clear();
  uint64_t kept_bytes() const { return kept_bytes_; }

 private:
  struct Bucket {
    std::deque<nanobind::bytes> values;
    uint64_t used_at = 0;
  };

  void shrink();

  const uint64_t limit_bytes_;
  uint64_t kept_bytes_ = 0;
  uint64_t num_calls_ = 0;
  std::map<uint64_t, Bucket> buckets_;  // By size.
};

}  // namespace tandem::bindings
