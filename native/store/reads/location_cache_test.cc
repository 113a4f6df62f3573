// Examples of the location cache: which entries it has, for how long, and which are dropped first.
#include "store/reads/location_cache.h"

#include <string>

#include "base/test.h"

namespace tandem::store {
namespace {

Location make_location(uint64_t version, double lease_end_s, int64_t endpoint = 0) {
  return {100, version, 7, endpoint, 512, lease_end_s};
}

TEST(location_cache_forgets_at_the_end_of_a_lease) {
  LocationCache cache(10);
  cache.insert("a", make_location(1, 2.0), 0);
  CHECK(cache.find("a", 1.9) != nullptr);
  CHECK(cache.find("a", 2.0) == nullptr);
  CHECK(cache.find("b", 0.0) == nullptr);
  cache.insert("a", make_location(2, 3.0), 0);
  CHECK_EQ(cache.find("a", 2.0)->version, 2u);
  CHECK_EQ(cache.size(), 1u);
}

TEST(location_cache_drops_what_was_noted_longest_ago) {
  LocationCache cache(3);
  for (const char* key : {"a", "b", "c"}) cache.insert(key, make_location(1, 9), 0);
  cache.insert("a", make_location(2, 9), 0);
  cache.insert(std::string(100, 'd'), make_location(1, 9), 0);
  CHECK_EQ(cache.size(), 3u);
  CHECK(cache.find("b", 0) == nullptr);
  for (const std::string& key : {std::string("a"), std::string("c"), std::string(100, 'd')})
    CHECK(cache.find(key, 0) != nullptr);
  // An entry in reused memory has lost its former key.
  for (int i = 0; i < 1000; ++i) cache.insert("key " + std::to_string(i), make_location(1, 9), 0);
  CHECK_EQ(cache.size(), 3u);
  CHECK(cache.find("key 999", 0) != nullptr && cache.find("key 997", 0) != nullptr);
  CHECK(cache.find("key 996", 0) == nullptr && cache.find("a", 0) == nullptr);
}

TEST(location_cache_of_no_size_keeps_nothing) {
  LocationCache cache(0);
  cache.insert("a", make_location(1, 9), 0);
  CHECK_EQ(cache.size(), 0u);
  CHECK(cache.find("a", 0) == nullptr);
}

TEST(location_cache_takes_nothing_that_was_asked_for_before_it_was_cleared) {
  LocationCache cache(10);
  const uint64_t generation = cache.generation();
  cache.insert("a", make_location(1, 9), generation);
  cache.clear();
  CHECK(cache.find("a", 0) == nullptr);
  cache.insert("a", make_location(1, 9), generation);
  CHECK_EQ(cache.size(), 0u);
  cache.insert("a", make_location(1, 9), cache.generation());
  CHECK_EQ(cache.size(), 1u);
}

TEST(location_cache_forgets_keys_and_endpoints) {
  LocationCache cache(10);
  for (int i = 0; i < 6; ++i)
    cache.insert("key " + std::to_string(i), make_location(1, 9, i % 2), 0);
  cache.forget_endpoint(1);
  CHECK_EQ(cache.size(), 3u);
  CHECK(cache.find("key 1", 0) == nullptr && cache.find("key 2", 0) != nullptr);
  cache.forget("key 2");
  cache.forget("key 2");
  CHECK_EQ(cache.size(), 2u);
}

}  // namespace
}  // namespace tandem::store
