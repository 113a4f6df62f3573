#include "store/reads/location_cache.h"

#include <utility>

namespace tandem::store {

const Location* LocationCache::find(std::string_view key, double now_s) const {
  const auto found = found_.find(key);
  if (found == found_.end()) return nullptr;
  const Location& location = found->second->location;
  return now_s < location.lease_end_s ? &location : nullptr;
}

void LocationCache::insert(std::string_view key, const Location& location, uint64_t generation) {
  if (max_locations_ == 0 || generation != generation_) return;
  if (const auto found = found_.find(key); found != found_.end()) {
    found->second->location = location;
    entries_.splice(entries_.end(), entries_, found->second);
    return;
  }
  if (entries_.size() == max_locations_) {
    // Reuse the memory of the oldest entry: its node and, mostly, that of its key.
    const auto oldest = entries_.begin();
    found_.erase(oldest->key);
    oldest->key.assign(key);
    oldest->location = location;
    entries_.splice(entries_.end(), entries_, oldest);
  } else {
    entries_.push_back({std::string(key), location});
  }
  const auto entry = std::prev(entries_.end());
  found_.emplace(entry->key, entry);
}

void LocationCache::forget(std::string_view key) {
  if (const auto found = found_.find(key); found != found_.end()) erase(found->second);
}

void LocationCache::forget_endpoint(int64_t endpoint) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->location.endpoint == endpoint) erase(entry);
    entry = next;
  }
}

void LocationCache::clear() {
  ++generation_;
  found_.clear();
  entries_.clear();
}

void LocationCache::erase(Entries::iterator entry) {
  found_.erase(entry->key);
  entries_.erase(entry);
}

}  // namespace tandem::store
