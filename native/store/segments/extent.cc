#include "store/segments/extent.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "store/reads/chunk_checksum.h"
#include "transfer/wire/crc32c.h"

namespace tandem::store {
namespace {

std::string name_of(const Object& object) {
  return "offset " + std::to_string(object.offset) + " for '" + std::string(object.key) + "'";
}

Status check_place(const SegmentMemory& segment, const Object& object) {
  const bool fits_fields = object.key.size() <= kMaxKeyBytes && object.size <= kMaxValueBytes &&
                           object.checksum <= 0xffffffff && object.wanted <= 0xff &&
                           object.soft_pin_ms <= 0xffffffff && object.version <= kMaxVersion;
  const uint64_t length = fits_fields ? extent_bytes(object.key.size(), object.size) : 0;
  if (!fits_fields || object.offset % kGranuleBytes != 0 || length > segment.usable_bytes ||
      object.offset > segment.usable_bytes - length)
    return {Code::kConfig, "store.segment",
            name_of(object) + ", " + std::to_string(object.size) + " bytes: the segment has " +
                std::to_string(segment.usable_bytes)};
  const uint64_t first = object.offset / kGranuleBytes;
  const uint64_t count = length / kGranuleBytes;
  if (first + count > segment.num_marks)
    return {Code::kConfig, "store.segment", name_of(object) + " is beyond the last mark"};
  if (std::memchr(segment.marks + first, kMark, count) != nullptr)
    return {Code::kConflict, "store.seal", name_of(object) + " holds another object"};
  return {};
}

Status check_apart(const std::vector<Object>& objects) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  ranges.reserve(objects.size());
  for (const Object& object : objects)
    ranges.emplace_back(object.offset, object.offset + extent_bytes(object.key.size(), object.size));
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second)
      return {Code::kConflict, "store.seal",
              "two objects at offset " + std::to_string(ranges[i].first)};
  }
  return {};
}

// Returns the checksum tables of the objects, concatenated, from the given tables or values.
Result<std::vector<uint32_t>> make_tables(const std::vector<Object>& objects, Missing missing,
                                          std::string_view blob) {
  std::vector<uint32_t> tables;
  if (missing == Missing::kNothing) return tables;
  uint64_t num_sums = 0, num_bytes = 0;
  for (const Object& object : objects) {
    num_sums += count_chunks(object.size);
    num_bytes += object.size;
  }
  const uint64_t expected = missing == Missing::kTables ? 4 * num_sums : num_bytes;
  if (blob.size() != expected)
    return Error{Code::kCorruption, "store.seal",
                 std::to_string(blob.size()) + " bytes for objects that need " +
                     std::to_string(expected), ""};
  tables.resize(num_sums);
  std::vector<uint32_t> checksums(objects.size());
  if (missing == Missing::kTables) {
    if (!blob.empty()) std::memcpy(tables.data(), blob.data(), blob.size());
    const uint32_t* at = tables.data();
    for (size_t i = 0; i < objects.size(); ++i) {
      const size_t chunks = count_chunks(objects[i].size);
      checksums[i] = chunks == 0 ? 0 : transfer::crc32c(0, at, 4 * chunks);
      at += chunks;
    }
  } else {
    std::vector<Value> values;
    values.reserve(objects.size());
    const uint8_t* at = reinterpret_cast<const uint8_t*>(blob.data());
    for (const Object& object : objects) {
      values.push_back({at, object.size});
      at += object.size;
    }
    checksum_values(values.data(), values.size(), kChunkBytes, checksums.data(), tables.data());
  }
  for (size_t i = 0; i < objects.size(); ++i) {
    if (checksums[i] != objects[i].checksum)
      return Error{Code::kCorruption, "store.seal",
                   name_of(objects[i]) + " came with a wrong checksum", ""};
  }
  return tables;
}

void write_object(const SegmentMemory& segment, uint8_t* extent, const Object& object) {
  write_header(extent, {.key = object.key,
                        .size = object.size,
                        .version = object.version,
                        .checksum = static_cast<uint32_t>(object.checksum),
                        .soft_pin_ms = static_cast<uint32_t>(object.soft_pin_ms),
                        .wanted = static_cast<uint8_t>(object.wanted),
                        .hard_pin = object.hard_pin,
                        .home = segment.home,
                        .position = object.offset});
}

}  // namespace

Status seal_objects(const SegmentMemory& segment, const std::vector<Object>& objects,
                    Missing missing, std::string_view blob) {
  for (const Object& object : objects) {
    if (Status status = check_place(segment, object); !status.is_ok()) return status;
  }
  if (Status status = check_apart(objects); !status.is_ok()) return status;
  Result<std::vector<uint32_t>> made = make_tables(objects, missing, blob);
  if (!made.is_ok()) return made.error();
  const uint32_t* table = made.value().data();
  const char* value = blob.data();
  for (const Object& object : objects) {
    uint8_t* const extent = segment.data + object.offset;
    const size_t table_bytes = 4 * count_chunks(object.size);
    if (missing != Missing::kNothing && table_bytes > 0) {
      std::memcpy(extent + table_offset(object.key.size()), table, table_bytes);
      table += count_chunks(object.size);
    }
    if (missing == Missing::kValues && object.size > 0) {
      std::memcpy(extent + value_offset(object.key.size(), object.size), value, object.size);
      value += object.size;
    }
    write_object(segment, extent, object);
    // Set the mark last, so that after a crash each set mark has a whole object.
    std::atomic_ref(segment.marks[object.offset / kGranuleBytes]).store(kMark, std::memory_order_release);
  }
  return {};
}

}  // namespace tandem::store
