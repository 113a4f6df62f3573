// Lookup of many objects in the directory. The directory's columns belong to Python
// (store/master/state/index.py); this pass over them is native, because it is too slow in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace tandem::store {

// The directory's columns, borrowed for one call. A row is an object. Copies are chained by row;
// the host number of a copy on disk is above kDiskTag.
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

// The reads that are sent to one host: their number and bytes.
struct HostReads {
  int64_t host = -1;
  uint64_t num_bytes = 0;
  uint64_t count = 0;
};

struct LocatedRows {
  // Four columns one after the other, over all rows: size, checksum, host, offset; -1 for a missing
  // value.
  std::vector<int64_t> columns;
  std::vector<int64_t> versions;
  // Indexes of the rows with several copies or with a copy on disk, for which no host is chosen
  // here.
  std::vector<uint32_t> undecided;
  std::vector<HostReads> reads;
};

// Finds the only copy of each row, extends the row's lease to `until_ms`, and marks it as used,
// with ticks after `last_tick`. A row of -1 is a missing object. Copies on hosts whose flag in
// `is_here` is 0 do not count. Errors: kInternal (a row or copy that does not exist).
Result<LocatedRows> locate_rows(const DirectoryColumns& directory, const std::vector<int64_t>& rows,
                                const std::vector<uint8_t>& is_here, int64_t until_ms,
                                int64_t last_tick);

}  // namespace tandem::store
