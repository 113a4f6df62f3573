// Where objects of a directory lie, for many at once. The directory is columns that Python owns
// (store/master/state/index.py); this is the one pass over them for which numbers of Python cost too much.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace tandem::store {

// Borrowed for one call. Rows are objects; copies are chained by row, those on disks above kDiskTag.
struct DirectoryColumns {
  size_t num_rows = 0;
  const int64_t* sizes = nullptr;
  const int64_t* versions = nullptr;
  const uint32_t* checksums = nullptr;
  int64_t* lease_until_ms = nullptr;
  int64_t* used_ticks = nullptr;
  const uint8_t* num_disks = nullptr;
  const int32_t* first_copy = nullptr;
  size_t num_copies = 0;
  const uint16_t* copy_hosts = nullptr;
  const int64_t* copy_offsets = nullptr;
  const int32_t* next_copy = nullptr;
};

// What readers were sent to one host for.
struct HostReads {
  int64_t host = -1;
  uint64_t num_bytes = 0;
  uint64_t count = 0;
};

struct LocatedRows {
  // Of all rows one after the other: sizes, checksums, hosts, offsets. -1 where there is none.
  std::vector<int64_t> columns;
  std::vector<int64_t> versions;
  // Indexes of the rows with several copies, or one on a disk: the host is not chosen.
  std::vector<uint32_t> undecided;
  std::vector<HostReads> reads;
};

// Finds the only copy of each row, extends its lease to `until_ms` and notes a use of it, with ticks
// after `last_tick`. A row of -1 is no object. A copy on a host whose flag in `is_here` is 0 is none.
// Errors: kInternal (a row or a copy that there is not).
Result<LocatedRows> locate_rows(const DirectoryColumns& directory, const std::vector<int64_t>& rows,
                                const std::vector<uint8_t>& is_here, int64_t until_ms,
                                int64_t last_tick);

}  // namespace tandem::store
