// Where objects lay when their master was last asked, for as long as their leases hold.
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

// Bounded: the location noted longest ago goes first, whose lease ends first. Not thread-safe.
class LocationCache {
 public:
  // One of 0 keeps nothing.
  explicit LocationCache(size_t max_locations) : max_locations_(max_locations) {}
  LocationCache(const LocationCache&) = delete;
  LocationCache& operator=(const LocationCache&) = delete;

  // Null if nothing is known, or its lease has ended. Valid until the next call of another method.
  const Location* find(std::string_view key, double now_s) const;
  // Notes what was asked for when `generation` was that of the cache; what is older is dropped.
  void insert(std::string_view key, const Location& location, uint64_t generation);
  void forget(std::string_view key);
  void forget_endpoint(int64_t endpoint);
  // Also of what is being asked for at this moment; see `generation`.
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
