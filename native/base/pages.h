// Operations on pages of memory that is already mapped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

// Allocates the pages of a range now, not one by one when they are touched; their contents stay.
// The range is widened to whole pages. Returns 0, or an errno: EINVAL if the kernel is too old
// (before 5.14), so that pages are allocated at the first touch as usual.
int populate_pages(uint8_t* data, size_t size_bytes, bool for_writing = true);

}  // namespace tandem
