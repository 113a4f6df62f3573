#include "store/reads/batch_read.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "store/reads/chunk_checksum.h"
#include "store/segments/extent.h"

namespace tandem::store {
namespace {

// Values whose gap is at most this are read in one piece, with the gap: its bytes cost less than
// another piece, unless they are more than a quarter of the piece.
constexpr uint64_t kMaxGapBytes = 2048;
constexpr uint64_t kMaxGapShare = 4;

constexpr uint64_t kMaxAddress = uint64_t{1} << 62;

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// A range of the endpoint's memory, read for one object.
struct Range {
  uint64_t begin;
  uint64_t end;
  uint32_t index;
};

}  // namespace

BatchRead::BatchRead(std::vector<std::string_view> keys, uint64_t direct_bytes)
    : objects_(keys.size()), direct_bytes_(direct_bytes) {
  for (size_t i = 0; i < keys.size(); ++i) objects_[i].key = keys[i];
}

void BatchRead::aim(std::vector<ReadTarget> targets) { targets_ = std::move(targets); }

bool BatchRead::fits(uint32_t index) const {
  return targets_.empty() || size_of(index) <= targets_[index].room;
}

size_t BatchRead::place_known(const LocationCache& cache, double now_s) {
  if (cache.size() == 0) return 0;
  size_t count = 0;
  for (uint32_t i = 0; i < objects_.size(); ++i) {
    Object& object = objects_[i];
    const Location* location = cache.find(object.key, now_s);
    if (object.state != State::kUnplaced || location == nullptr) continue;
    object.location = *location;
    object.is_remembered = true;
    // Leave an object unplaced if its cached size does not fit the target: it may have been
    // replaced by one of another size, which the master knows.
    if (!fits(i)) continue;
    object.state = State::kPlaced;
    ++count;
  }
  return count;
}

std::vector<uint32_t> BatchRead::list_unplaced() const {
  std::vector<uint32_t> unplaced;
  for (uint32_t i = 0; i < objects_.size(); ++i)
    if (objects_[i].state == State::kUnplaced) unplaced.push_back(i);
  return unplaced;
}

Status BatchRead::place(const std::vector<uint32_t>& asked, const int64_t* columns,
                        const int64_t* versions, const std::map<int64_t, ReadBase>& hosts,
                        double lease_end_s, LocationCache& cache, uint64_t generation) {
  const size_t count = asked.size();
  for (size_t i = 0; i < count; ++i) {
    Object& object = objects_[asked[i]];
    const int64_t size = columns[i], checksum = columns[count + i];
    const int64_t host = columns[2 * count + i], offset = columns[3 * count + i];
    const auto found = hosts.find(host);
    object.state = State::kGivenUp;
    // An empty value has no bytes to read, so it needs no place.
    if (size <= 0 || found == hosts.end()) continue;
    const auto& [endpoint, base] = found->second;
    if (static_cast<uint64_t>(size) > kMaxValueBytes || checksum < 0 || checksum > 0xffffffff ||
        offset < 0 || static_cast<uint64_t>(offset) > kMaxAddress || base > kMaxAddress)
      return {Code::kCorruption, "store.get",
              "an object of " + std::to_string(size) + " bytes at " + std::to_string(offset)};
    object.location = {static_cast<uint64_t>(size),
                       versions == nullptr ? 0 : static_cast<uint64_t>(versions[i]),
                       static_cast<uint32_t>(checksum), endpoint,
                       base + static_cast<uint64_t>(offset), lease_end_s};
    object.is_remembered = false;
    if (versions != nullptr) cache.insert(object.key, object.location, generation);
    if (fits(asked[i])) object.state = State::kPlaced;
  }
  return {};
}

std::vector<int64_t> BatchRead::list_endpoints() const {
  std::vector<int64_t> endpoints;
  for (const Object& object : objects_) {
    if (object.state != State::kPlaced) continue;
    const int64_t endpoint = object.location.endpoint;
    if (std::find(endpoints.begin(), endpoints.end(), endpoint) == endpoints.end())
      endpoints.push_back(endpoint);
  }
  return endpoints;
}

ReadPlan BatchRead::plan(int64_t endpoint) {
  ReadPlan plan;
  plan.lease_end_s = std::numeric_limits<double>::infinity();
  planned_.clear();
  std::vector<Range> ranges;
  ranges.reserve(objects_.size());
  for (uint32_t i = 0; i < objects_.size(); ++i) {
    Object& object = objects_[i];
    const Location& location = object.location;
    if (object.state != State::kPlaced || location.endpoint != endpoint) continue;
    planned_.push_back(i);
    object.is_good = true;
    plan.lease_end_s = std::min(plan.lease_end_s, location.lease_end_s);
    const uint64_t extent_at = location.extent_at;
    const uint64_t value_at = extent_at + value_offset(object.key.size(), location.size);
    if (is_direct(i)) {
      plan.direct.push_back({i, value_at, location.size});
      if (object.is_remembered)
        ranges.push_back({extent_at, extent_at + table_offset(object.key.size()), i});
    } else {
      const uint64_t begin = object.is_remembered ? extent_at : value_at;
      ranges.push_back({begin, value_at + location.size, i});
    }
  }
  const auto is_before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), is_before))
    std::stable_sort(ranges.begin(), ranges.end(), is_before);
  uint64_t end = 0;  // Of the piece under way.
  for (const Range& range : ranges) {
    const uint64_t length = range.end - range.begin;
    const uint64_t limit = std::min(kMaxGapBytes, length / kMaxGapShare);
    // A range of the same object that was asked for twice begins a new piece, too.
    if (plan.pieces.empty() || range.begin < end || range.begin - end > limit) {
      plan.pieces.push_back({plan.scratch_bytes, range.begin, 0});
    }
    ReadPiece& piece = plan.pieces.back();
    end = range.end;
    piece.length = end - piece.remote;
    plan.scratch_bytes = piece.local + piece.length;
    Object& object = objects_[range.index];
    object.header_at = piece.local + (range.begin - piece.remote);
    object.scratch_at = plan.scratch_bytes - object.location.size;
  }
  return plan;
}

bool BatchRead::has_header(const Object& object, const uint8_t* scratch) const {
  // Compare the header fields that identify the object with the master's answer. The other fields
  // change with the object's pins.
  const uint8_t* header = scratch + object.header_at;
  return load<uint32_t>(header) == kObjectMagic &&
         load<uint16_t>(header + kKeyBytesAt) == object.key.size() &&
         load<uint64_t>(header + kSizeAt) == object.location.size &&
         load<uint64_t>(header + kVersionAt) == object.location.version &&
         load<uint32_t>(header + kChecksumAt) == object.location.checksum &&
         std::memcmp(header + kHeaderBytes, object.key.data(), object.key.size()) == 0;
}

void BatchRead::check_headers(const uint8_t* scratch) {
  for (const uint32_t index : planned_) {
    Object& object = objects_[index];
    if (object.is_remembered && !has_header(object, scratch)) object.is_good = false;
  }
}

void BatchRead::check_values(const uint8_t* scratch, const uint8_t* memory) {
  std::vector<uint32_t> checked;
  std::vector<Value> values;
  checked.reserve(planned_.size());
  values.reserve(planned_.size());
  for (const uint32_t index : planned_) {
    const Object& object = objects_[index];
    if (!object.is_good || (is_direct(index) && memory == nullptr)) continue;
    checked.push_back(index);
    const uint8_t* at = is_direct(index) ? memory + targets_[index].offset
                                         : scratch + object.scratch_at;
    values.push_back({at, object.location.size});
  }
  std::vector<uint32_t> checksums(values.size());
  checksum_values(values.data(), values.size(), kChunkBytes, checksums.data(), nullptr);
  for (size_t i = 0; i < checked.size(); ++i) check_direct(checked[i], checksums[i]);
}

void BatchRead::check_direct(uint32_t index, uint32_t checksum) {
  Object& object = objects_[index];
  if (object.location.checksum != checksum) object.is_good = false;
}

std::vector<uint32_t> BatchRead::finish(double now_s, LocationCache& cache, bool was_read) {
  std::vector<uint32_t> done;
  done.reserve(planned_.size());
  for (const uint32_t index : planned_) {
    Object& object = objects_[index];
    // Drop a value that was read past its lease: its space may have been reused during the read.
    if (was_read && object.is_good && now_s <= object.location.lease_end_s) {
      object.state = State::kDone;
      done.push_back(index);
      continue;
    }
    cache.forget(object.key);
    object.state = object.is_remembered ? State::kUnplaced : State::kGivenUp;
  }
  planned_.clear();
  return done;
}

std::vector<uint32_t> BatchRead::take_given_up() {
  std::vector<uint32_t> taken;
  for (uint32_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i].state != State::kGivenUp) continue;
    objects_[i].state = State::kDone;
    taken.push_back(i);
  }
  return taken;
}

void BatchRead::copy_to_target(uint32_t index, const uint8_t* scratch, uint8_t* memory) const {
  const Object& object = objects_[index];
  std::memcpy(memory + targets_[index].offset, scratch + object.scratch_at, object.location.size);
}

}  // namespace tandem::store
