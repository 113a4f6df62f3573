// Planning of reads of many whole objects: which have cached locations, which ranges are read in
// one piece, and which values are intact. Works on memory that its user lends; does no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "store/reads/location_cache.h"

namespace tandem::store {

// One range to read: from address `remote` of the endpoint to offset `local` in the scratch memory.
struct ReadPiece {
  uint64_t local = 0;
  uint64_t remote = 0;
  uint64_t length = 0;
};

// A value that is read directly into its destination instead of the scratch memory.
struct DirectRead {
  uint32_t index = 0;  // Of its key.
  uint64_t remote = 0;
  uint64_t length = 0;
};

struct ReadPlan {
  uint64_t scratch_bytes = 0;
  double lease_end_s = 0;  // The earliest.
  std::vector<ReadPiece> pieces;
  std::vector<DirectRead> direct;
};

// The place for one value in the caller's memory.
struct ReadTarget {
  uint64_t offset = 0;
  uint64_t room = 0;
};

// The user's number of an endpoint, and the address at which its segment begins.
struct ReadBase {
  int64_t endpoint = -1;
  uint64_t base = 0;
};

// The objects of one request. Each is unplaced, placed, done, or given up: left to the caller to
// handle in another way. An object that is read from a cached location is read with its header,
// since it may have been removed. If the header is not that of the cached version, the location is
// forgotten and the object is unplaced again. Not thread-safe. Only `check_values` may take long.
class BatchRead {
 public:
  // Borrows the keys. Values of at least `direct_bytes` are read without scratch memory.
  BatchRead(std::vector<std::string_view> keys, uint64_t direct_bytes);

  // Sets the destination of each value. A value that does not fit is given up. REQUIRES: no object
  // is placed yet.
  void aim(std::vector<ReadTarget> targets);

  // Places the objects that the cache has locations of; returns their number.
  size_t place_known(const LocationCache& cache, double now_s);
  // Returns the keys that are neither placed nor done nor given up.
  std::vector<uint32_t> list_unplaced() const;
  // Takes the master's answer for these keys: size, checksum, host and offset as columns of int64;
  // `versions` may be null. An object whose host is not in `hosts` is given up. Objects with
  // versions are added to the cache, unless it was cleared since `generation`. Errors: kCorruption
  // (numbers that no object can have).
  Status place(const std::vector<uint32_t>& asked, const int64_t* columns, const int64_t* versions,
               const std::map<int64_t, ReadBase>& hosts, double lease_end_s, LocationCache& cache,
               uint64_t generation);

  // Returns the endpoints that objects are to be read from, each once.
  std::vector<int64_t> list_endpoints() const;
  // Returns the ranges to read from an endpoint. The calls below refer to the last plan.
  ReadPlan plan(int64_t endpoint);
  // Unplaces the objects with cached locations whose headers are not those of their versions.
  // `scratch` has the plan's bytes.
  void check_headers(const uint8_t* scratch);
  // Gives up the values whose checksums are wrong. Of direct values only those with a target in
  // `memory` are checked.
  void check_values(const uint8_t* scratch, const uint8_t* memory);
  // Gives up a direct value that is elsewhere, if its checksum is wrong.
  void check_direct(uint32_t index, uint32_t checksum);
  // Marks the values that were not given up and whose leases hold as done, and returns them.
  // `was_read` is false if the read failed.
  std::vector<uint32_t> finish(double now_s, LocationCache& cache, bool was_read);

  // Copies a value from scratch memory to its target. REQUIRES: the value is done and was not
  // direct.
  void copy_to_target(uint32_t index, const uint8_t* scratch, uint8_t* memory) const;

  // Returns the objects given up since the last call. They count as done, unless they are placed
  // again.
  std::vector<uint32_t> take_given_up();

  size_t num_keys() const { return objects_.size(); }
  uint64_t size_of(uint32_t index) const { return objects_[index].location.size; }
  bool is_direct(uint32_t index) const { return size_of(index) >= direct_bytes_; }
  // Offset of the value in the plan's scratch memory.
  uint64_t scratch_at(uint32_t index) const { return objects_[index].scratch_at; }
  const ReadTarget& target_of(uint32_t index) const { return targets_[index]; }

 private:
  enum class State : uint8_t { kUnplaced, kPlaced, kDone, kGivenUp };
  struct Object {
    std::string_view key;
    Location location;
    State state = State::kUnplaced;
    bool is_remembered = false;  // Read with its header.
    bool is_good = false;
    uint64_t header_at = 0;   // In the scratch memory.
    uint64_t scratch_at = 0;  // The same of the value.
  };

  bool fits(uint32_t index) const;
  bool has_header(const Object& object, const uint8_t* scratch) const;

  std::vector<Object> objects_;
  std::vector<ReadTarget> targets_;
  uint64_t direct_bytes_;
  std::vector<uint32_t> planned_;
};

}  // namespace tandem::store
