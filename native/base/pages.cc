#include "base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers lack them.
#define MADV_POPULATE_WRITE 23
#endif

namespace tandem {

int populate_pages(uint8_t* data, size_t size_bytes, bool for_writing) {
  if (size_bytes == 0) return 0;
  const uintptr_t misfit =
      reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const int advice = for_writing ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (madvise(data - misfit, size_bytes + misfit, advice) != 0)
    if (errno != EINTR && errno != EAGAIN) return errno;
  return 0;
}

}  // namespace tandem
