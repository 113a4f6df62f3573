#include "store/reads/locate.h"

#include <algorithm>
#include <string>

namespace tandem::store {
namespace {

constexpr uint16_t kDiskTag = 0x8000;

void note_read(std::vector<HostReads>& reads, int64_t host, int64_t size) {
  auto found = std::find_if(reads.begin(), reads.end(),
                            [host](const HostReads& each) { return each.host == host; });
  if (found == reads.end()) found = reads.insert(reads.end(), {host, 0, 0});
  found->num_bytes += static_cast<uint64_t>(size);
  ++found->count;
}

}  // namespace

Result<LocatedRows> locate_rows(const DirectoryColumns& directory, const std::vector<int64_t>& rows,
                                const std::vector<uint8_t>& is_here, int64_t until_ms,
                                int64_t last_tick) {
  const size_t count = rows.size();
  LocatedRows located;
  located.columns.assign(4 * count, -1);
  located.versions.assign(count, -1);
  int64_t* const sizes = located.columns.data();
  int64_t* const checksums = sizes + count;
  int64_t* const hosts = checksums + count;
  int64_t* const offsets = hosts + count;
  for (size_t i = 0; i < count; ++i) {
    const int64_t row = rows[i];
    if (row < 0) continue;
    if (static_cast<uint64_t>(row) >= directory.num_rows)
      return Error{Code::kInternal, "store.locate", "no row " + std::to_string(row), ""};
    sizes[i] = directory.sizes[row];
    checksums[i] = directory.checksums[row];
    located.versions[i] = directory.versions[row];
    directory.used_ticks[row] = ++last_tick;
    directory.lease_until_ms[row] = std::max(directory.lease_until_ms[row], until_ms);
    const int32_t copy = directory.first_copy[row];
    if (copy < 0 || sizes[i] == 0) continue;  // Nowhere, or nothing to read.
    if (static_cast<size_t>(copy) >= directory.num_copies)
      return Error{Code::kInternal, "store.locate", "no copy " + std::to_string(copy), ""};
    if (directory.next_copy[copy] >= 0 || directory.num_disks[row] > 0) {
      located.undecided.push_back(static_cast<uint32_t>(i));
      continue;
    }
    const uint16_t host = directory.copy_hosts[copy];
    if (host >= kDiskTag || host >= is_here.size() || is_here[host] == 0) continue;
    hosts[i] = host;
    offsets[i] = directory.copy_offsets[copy];
    note_read(located.reads, host, sizes[i]);
  }
  return located;
}

}  // namespace tandem::store
