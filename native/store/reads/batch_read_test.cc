// Examples of batches of reads: which ranges become one piece, and which bytes are accepted as an
// object.
#include "store/reads/batch_read.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/test.h"
#include "store/reads/chunk_checksum.h"
#include "store/segments/extent.h"
#include "store/reads/locate.h"

namespace tandem::store {
namespace {

constexpr uint64_t kBase = uint64_t{1} << 40;
constexpr uint64_t kDirect = 100'000;

// Objects sealed in a segment of 1 MiB, and a master's answers about them.
struct World {
  std::vector<uint8_t> marks = std::vector<uint8_t>(2048);
  std::vector<uint8_t> data = std::vector<uint8_t>(1u << 20);
  std::map<std::string, std::pair<Object, std::string>> objects;

  void put(const std::string& key, uint64_t offset, const std::string& value, uint64_t version) {
    const Value seen{reinterpret_cast<const uint8_t*>(value.data()), value.size()};
    uint32_t checksum;
    checksum_values(&seen, 1, kChunkBytes, &checksum, nullptr);
    auto& [object, kept] = objects[key];
    kept = value;
    object = {objects.find(key)->first, offset, value.size(), version, checksum, 1, 0, false};
    const SegmentMemory memory{marks.data(), marks.size(), data.data(), data.size()};
    CHECK(seal_objects(memory, {object}, Missing::kValues, value).is_ok());
  }

  void place(BatchRead& batch, const std::vector<std::string>& keys, LocationCache& cache,
             double lease_end_s = 10, bool has_versions = true) {
    const auto asked = batch.list_unplaced();
    const size_t count = asked.size();
    std::vector<int64_t> columns(4 * count, -1), versions(count, -1);
    for (size_t i = 0; i < count; ++i) {
      const auto found = objects.find(keys[asked[i]]);
      if (found == objects.end()) continue;
      const Object& object = found->second.first;
      columns[i] = static_cast<int64_t>(object.size);
      columns[count + i] = static_cast<int64_t>(object.checksum);
      columns[2 * count + i] = 5;
      columns[3 * count + i] = static_cast<int64_t>(object.offset);
      versions[i] = static_cast<int64_t>(object.version);
    }
    CHECK(batch.place(asked, columns.data(), has_versions ? versions.data() : nullptr,
                      {{5, {3, kBase}}}, lease_end_s, cache, cache.generation()).is_ok());
  }

  std::vector<uint8_t> read(const ReadPlan& plan) const {
    std::vector<uint8_t> scratch(plan.scratch_bytes, 0xee);
    for (const auto& [local, remote, length] : plan.pieces)
      std::memcpy(scratch.data() + local, data.data() + (remote - kBase), length);
    return scratch;
  }
};

// Reads one endpoint; returns the objects that are done.
std::vector<uint32_t> step(const World& world, BatchRead& batch, LocationCache& cache,
                           std::vector<std::string>& values, double now_s = 1) {
  const ReadPlan plan = batch.plan(3);
  const std::vector<uint8_t> scratch = world.read(plan);
  batch.check_headers(scratch.data());
  batch.check_values(scratch.data(), nullptr);
  std::vector<uint32_t> done = batch.finish(now_s, cache, true);
  for (const uint32_t index : done)
    if (!batch.is_direct(index))
      values[index].assign(
          reinterpret_cast<const char*>(scratch.data()) + batch.scratch_at(index),
          batch.size_of(index));
  return done;
}

std::vector<std::string_view> view(const std::vector<std::string>& keys) {
  return {keys.begin(), keys.end()};
}

TEST(batch_read_takes_neighbours_in_one_piece) {
  World world;
  std::vector<std::string> keys;
  for (int i = 0; i < 8; ++i) {
    keys.push_back("key " + std::to_string(i));
    world.put(keys.back(), 4608 * i, std::string(4096, static_cast<char>('a' + i)), 7);
  }
  keys.push_back("none");
  keys.push_back(keys[2]);  // Twice.
  world.put("far", 900'000 / 512 * 512, "value", 7);
  keys.push_back("far");
  LocationCache cache(100);
  for (const bool is_known : {false, true}) {
    BatchRead batch(view(keys), kDirect);
    CHECK_EQ(batch.place_known(cache, 1), is_known ? 10u : 0u);
    world.place(batch, keys, cache);
    CHECK(batch.list_endpoints() == std::vector<int64_t>{3});
    const ReadPlan plan = batch.plan(3);
    // The first objects, the repeated key, the others, and the distant one.
    CHECK(plan.pieces.size() >= 2 && plan.pieces.size() <= 4);
    CHECK(plan.direct.empty());
    uint64_t end = 0;
    for (const ReadPiece& piece : plan.pieces) {
      CHECK_EQ(piece.local, end);
      end += piece.length;
    }
    CHECK_EQ(plan.scratch_bytes, end);
    std::vector<std::string> values(keys.size());
    CHECK_EQ(step(world, batch, cache, values).size(), 10u);
    for (size_t i = 0; i < keys.size(); ++i)
      CHECK_EQ(values[i], keys[i] == "none" ? "" : world.objects[keys[i]].second);
    CHECK(batch.list_unplaced().empty() && batch.list_endpoints().empty());
  }
}

TEST(batch_read_asks_again_for_what_is_not_where_it_was) {
  const std::vector<std::string> keys = {"one", "two"};
  for (int kind = 0; kind < 5; ++kind) {
    World world;
    world.put("one", 512, std::string(1000, 'a'), 7);
    world.put("two", 4096, std::string(1000, 'b'), 7);
    LocationCache cache(100);
    BatchRead first(view(keys), kDirect);
    world.place(first, keys, cache);
    std::vector<std::string> values(2);
    CHECK_EQ(step(world, first, cache, values).size(), 2u);
    CHECK_EQ(cache.size(), 2u);
    uint8_t* header = world.data.data() + 512;
    if (kind == 0) std::memset(header, 0, 4);              // Wiped.
    if (kind == 1) header[16] ^= 1;                        // Another version.
    if (kind == 2) header[kHeaderBytes] = 'O';             // Of another key.
    if (kind == 3) header[value_offset(3, 1000)] = 'x';    // Another value.
    if (kind == 4) std::memcpy(header + 6, "\5\1", 2);     // Pins: of no importance.
    BatchRead again(view(keys), kDirect);
    CHECK_EQ(again.place_known(cache, 1), 2u);
    const std::vector<uint32_t> done = step(world, again, cache, values);
    if (kind == 4) {
      CHECK_EQ(done.size(), 2u);
      continue;
    }
    CHECK(done == std::vector<uint32_t>{1});
    CHECK_EQ(cache.size(), 1u);
    CHECK(again.list_unplaced() == std::vector<uint32_t>{0});
    // The master answers with the object's new place, which is read without a header.
    if (kind != 3) world.put("one", 65'536, std::string(2000, 'c'), 8);
    world.place(again, keys, cache);
    const std::vector<uint32_t> rest = step(world, again, cache, values);
    // Wrong bytes at a place in the master's answer are given up.
    CHECK_EQ(rest.size(), kind == 3 ? 0u : 1u);
    if (kind != 3) CHECK_EQ(values[0], std::string(2000, 'c'));
    CHECK(again.list_unplaced().empty());
  }
}

TEST(batch_read_uses_nothing_past_its_lease) {
  World world;
  world.put("one", 512, "value", 7);
  const std::vector<std::string> keys = {"one"};
  LocationCache cache(100);
  std::vector<std::string> values(1);
  BatchRead batch(view(keys), kDirect);
  world.place(batch, keys, cache, 10);
  CHECK(step(world, batch, cache, values, 10.5).empty());
  CHECK(batch.list_unplaced().empty());
  CHECK_EQ(cache.size(), 0u);
  BatchRead second(view(keys), kDirect);
  world.place(second, keys, cache, 10);
  BatchRead late(view(keys), kDirect);
  CHECK_EQ(late.place_known(cache, 10.0), 0u);
  CHECK_EQ(late.place_known(cache, 9.0), 1u);
  CHECK(step(world, late, cache, values, 10.5).empty());
  CHECK_EQ(late.list_unplaced().size(), 1u);
}

TEST(batch_read_reads_large_values_apart_from_their_headers) {
  World world;
  const std::string large(200'000, 'l');
  world.put("large", 512, large, 7);
  world.put("small", 512 * 1000, "value", 7);
  const std::vector<std::string> keys = {"large", "small"};
  LocationCache cache(100);
  for (const bool is_known : {false, true}) {
    BatchRead batch(view(keys), kDirect);
    std::vector<uint8_t> memory(300'000);
    batch.aim({{50'000, 250'000}, {0, 10}});
    CHECK_EQ(batch.place_known(cache, 1), is_known ? 2u : 0u);
    world.place(batch, keys, cache);
    const ReadPlan plan = batch.plan(3);
    CHECK_EQ(plan.direct.size(), 1u);
    CHECK_EQ(plan.pieces.size(), is_known ? 2u : 1u);
    const auto& [index, remote, length] = plan.direct[0];
    std::memcpy(memory.data() + 50'000, world.data.data() + (remote - kBase), length);
    const std::vector<uint8_t> scratch = world.read(plan);
    batch.check_headers(scratch.data());
    batch.check_values(scratch.data(), memory.data());
    CHECK_EQ(batch.finish(1, cache, true).size(), 2u);
    batch.copy_to_target(1, scratch.data(), memory.data());
    CHECK(std::memcmp(memory.data() + 50'000, large.data(), large.size()) == 0);
    CHECK(std::memcmp(memory.data(), "value", 5) == 0);
  }
}

TEST(batch_read_gives_up_what_does_not_fit) {
  World world;
  world.put("one", 512, std::string(100, 'a'), 7);
  const std::vector<std::string> keys = {"one"};
  LocationCache cache(100);
  for (int round = 0; round < 2; ++round) {  // The second time it is remembered.
    BatchRead batch(view(keys), kDirect);
    batch.aim({{0, 99}});
    CHECK_EQ(batch.place_known(cache, 1), 0u);
    CHECK_EQ(batch.list_unplaced().size(), 1u);
    world.place(batch, keys, cache);
    CHECK(batch.list_unplaced().empty() && batch.list_endpoints().empty());
  }
}

TEST(batch_read_remembers_nothing_without_a_version) {
  World world;
  world.put("one", 512, "value", 7);
  const std::vector<std::string> keys = {"one"};
  LocationCache cache(100);
  BatchRead batch(view(keys), kDirect);
  world.place(batch, keys, cache, 10, false);
  std::vector<std::string> values(1);
  CHECK_EQ(step(world, batch, cache, values).size(), 1u);
  CHECK_EQ(cache.size(), 0u);
}

TEST(batch_read_refuses_numbers_that_no_object_has) {
  const std::vector<std::string> keys = {"one"};
  LocationCache cache(100);
  const int64_t far = int64_t{1} << 62;
  for (const std::vector<int64_t>& columns : std::vector<std::vector<int64_t>>{
           {far, 1, 5, 0}, {1, -1, 5, 0}, {1, int64_t{1} << 32, 5, 0}, {1, 1, 5, -1},
           {1, 1, 5, far + 1}}) {
    BatchRead batch(view(keys), kDirect);
    const Status status =
        batch.place({0}, columns.data(), nullptr, {{5, {3, kBase}}}, 10, cache, 0);
    CHECK(!status.is_ok() && status.error().code == Code::kCorruption);
    CHECK(batch.list_endpoints().empty());
  }
}

TEST(locate_rows_refuses_rows_and_copies_that_there_are_not) {
  int64_t sizes[2] = {10, 10}, versions[2] = {1, 1}, leases[2] = {}, ticks[2] = {};
  const uint32_t checksums[2] = {};
  const uint8_t num_disks[2] = {};
  const int32_t first[2] = {0, 9}, next[1] = {-1};
  const uint16_t hosts[1] = {0};
  const int64_t offsets[1] = {512};
  const DirectoryColumns directory{2,     sizes, versions, checksums, leases, ticks, num_disks,
                                   first, 1,     hosts,    offsets,   next};
  CHECK(locate_rows(directory, {0, -1}, {1}, 5, 0).is_ok());
  CHECK_EQ(leases[0], 5);
  for (const int64_t row : {2, 1}) {
    const auto located = locate_rows(directory, {row}, {1}, 5, 0);
    CHECK(!located.is_ok() && located.error().code == Code::kInternal);
  }
}

}  // namespace
}  // namespace tandem::store
