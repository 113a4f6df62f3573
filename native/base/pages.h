// Pages of memory that is mapped already.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

// Maps the pages of a range now instead of one by one when they are touched; their contents stay.
// The range is widened to whole pages. Zero, or errno: EINVAL from a kernel that cannot (before
// 5.14), where a touch is a touch.
int populate_pages(uint8_t* data, size_t size_bytes, bool for_writing = true);

}  // namespace tandem
