// The arithmetic of reading many whole objects at once: which are known where, what to read side by
// side, which of it is what was written. Sees memory that its user lends; moves no byte but copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "store/reads/location_cache.h"

namespace tandem::store {

// One range to read: from `remote` in the endpoint's address space to `local` in the scratch memory.
struct ReadPiece {
  uint64_t local = 0;
  uint64_t remote = 0;
  uint64_t length = 0;
};

// A value that is read to where it shall be, not by way of the scratch memory.
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

// Room for one value in memory of the caller.
struct ReadTarget {
  uint64_t offset = 0;
  uint64_t room = 0;
};

// An endpoint as its user numbers it, and where its segment begins.
struct ReadBase {
  int64_t endpoint = -1;
  uint64_t base = 0;
};

// The objects of one request. Each is unplaced, placed, done, or given up: not simple, to be read in
// some other way. What is read from a place that was remembered takes the object's header along,
// since the object may be gone: if that is not the header of this very version any more, the place is
// forgotten and the object unplaced again. Not thread-safe; `check_values` alone may take long.
class BatchRead {
 public:
  // The keys are borrowed. Values of `direct_bytes` or more are read without scratch memory.
  BatchRead(std::vector<std::string_view> keys, uint64_t direct_bytes);

  // Where values shall be; one for each key. What does not fit is given up.
  // REQUIRES: nothing is placed yet.
  void aim(std::vector<ReadTarget> targets);

  // Places what the cache knows; returns how many.
  size_t place_known(const LocationCache& cache, double now_s);
  // The keys that are neither placed nor done nor given up.
  std::vector<uint32_t> list_unplaced() const;
  // Takes a master's answer for these keys: size, checksum, host and offset as columns of int64;
  // `versions` may be null. An object without a host among `hosts` is given up. What has a version is
  // noted in the cache, unless that was cleared since `generation`.
  // Errors: kCorruption (numbers that no object can have).
  Status place(const std::vector<uint32_t>& asked, const int64_t* columns, const int64_t* versions,
               const std::map<int64_t, ReadBase>& hosts, double lease_end_s, LocationCache& cache,
               uint64_t generation);

  // The endpoints that have something to be read, each once.
  std::vector<int64_t> list_endpoints() const;
  // What to read of an endpoint; the calls below are about this plan, until the next.
  ReadPlan plan(int64_t endpoint);
  // Drops what was remembered and whose header is not that of its version. `scratch` has the
  // plan's bytes.
  void check_headers(const uint8_t* scratch);
  // Drops what differs from its checksum; of direct values only those that have a target in `memory`.
  void check_values(const uint8_t* scratch, const uint8_t* memory);
  // As `check_values`, of a direct value that lies elsewhere.
  void check_direct(uint32_t index, uint32_t checksum);
  // What was not dropped, and whose lease holds, is done: returns which. `was_read` false: nothing
  // came.
  std::vector<uint32_t> finish(double now_s, LocationCache& cache, bool was_read);

  // Copies a value that is done, and was not direct, to its target.
  void copy_to_target(uint32_t index, const uint8_t* scratch, uint8_t* memory) const;

  // Returns what has been given up since the last time; from now on these are done, unless they are
  // placed anew.
  std::vector<uint32_t> take_given_up();

  size_t num_keys() const { return objects_.size(); }
  uint64_t size_of(uint32_t index) const { return objects_[index].location.size; }
  bool is_direct(uint32_t index) const { return size_of(index) >= direct_bytes_; }
  // Where the value is in the scratch memory of the plan.
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
