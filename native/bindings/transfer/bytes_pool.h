// Memory of large results: bytes objects that are given out again when nobody else has them any more.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

namespace tandem::bindings {

// Fresh memory costs more to touch than a copy does, so the memory of a value that its user has
// dropped is worth keeping. An object whose only reference is ours can be seen by nobody: it may be
// filled anew, if its cached hash is forgotten. Where that cannot be done (another layout, no GIL)
// nothing is kept. All calls with the GIL.
class BytesPool {
 public:
  explicit BytesPool(uint64_t limit_bytes);

  // Objects of these sizes; their bytes are anything, and the caller's alone to fill before he shows
  // them to others.
  std::vector<nanobind::bytes> take(const std::vector<uint64_t>& sizes);
  // Takes note of objects that were filled; they may be in use for as long as their users like.
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
