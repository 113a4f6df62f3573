// A client's cache of object locations from its master's answers, valid while their leases hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>

namespace tandem::store {

struct Location {
  uint64_t size = 0;
  uint64_t version = 0;
  uint32_t checksum = 0;
  int64_t endpoint = -1;    // Whatever its user numbers places with; never negative.
  uint64_t extent_at = 0;   // In the address space of the endpoint.
  double lease_end_s = 0;
};

// A cache of limited size. The oldest entry, whose lease ends first, is dropped first. Not
// thread-safe.
class LocationCache {
 public:
  // A size of 0 caches nothing.
  explicit LocationCache(size_t max_locations) : max_locations_(max_locations) {}
  LocationCache(const LocationCache&) = delete;
  LocationCache& operator=(const LocationCache&) = delete;

  // Returns null if the key has no entry, or its lease has ended. The pointer is valid until the
  // next call of another method.
  const Location* find(std::string_view key, double now_s) const;
  // Adds a location that was asked for while the cache had `generation`. It is ignored if the cache
  // was cleared since.
  void insert(std::string_view key, const Location& location, uint64_t generation);
  void forget(std::string_view key);
  void forget_endpoint(int64_t endpoint);
  // Drops all entries, and ignores answers that are being waited for; see `generation`.
  void clear();
  uint64_t generation() const { return generation_; }
  size_t size() const { return found_.size(); }

 private:
  struct Entry {
    std::string key;
    Location location;
  };
  using Entries = std::list<Entry>;

  void erase(Entries::iterator entry);

  size_t max_locations_;
  uint64_t generation_ = 0;
  Entries entries_;  // Oldest first.
  std::unordered_map<std::string_view, Entries::iterator> found_;  // Views of the entries' keys.
};

}  // namespace tandem::store
