// Memory for weights and KV: page-aligned (so at least 64-byte aligned), zeroed, on huge pages
// where the machine has them. One owner; freed with the object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"

namespace tandem {

// Kind of pages that the buffer's memory consists of, best first.
enum class PageKind {
  kHugetlb,      // Preallocated 2 MiB pages, all present.
  kTransparent,  // 2 MiB pages requested by madvise; the kernel grants them as it can.
  kBase,         // Ordinary pages.
};

// A range of a buffer that should lie in the memory of one NUMA node: the bytes from the end of the
// range before (or from the buffer's start) to `end_bytes`.
struct NodeShare {
  size_t end_bytes = 0;
  int node_id = 0;
};

class AlignedBuffer {
 public:
  struct Options {
    // If true, try preallocated huge pages, then transparent ones, then ordinary pages. It pays
    // from some MiB on, because the size is rounded up to 2 MiB.
    bool hugepages = false;
    // NUMA node on which the pages should lie. This is a preference: if the node is full, pages
    // come from another one, whereas a strict binding would end the process.
    std::optional<int> numa_node;
    // NUMA nodes for consecutive shares of the buffer, used instead of `numa_node`; the borders of
    // shares move to the nearest page.
    std::vector<NodeShare> node_shares = {};
  };

  // Errors: kConfig (size 0), kCapacity (more than the machine's memory, or refused by the kernel),
  // kNotFound (no such NUMA node for this process).
  static Result<AlignedBuffer> allocate(size_t size_bytes, const Options& options);

  AlignedBuffer(AlignedBuffer&& other) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  uint8_t* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  // Bytes of memory that were taken from the machine: the size rounded up to whole pages.
  size_t capacity_bytes() const { return mapped_bytes_; }
  PageKind page_kind() const { return page_kind_; }
  // Bytes from the buffer's start whose pages are already allocated, so that touching them cannot
  // fail.
  size_t reserved_bytes() const { return reserved_bytes_; }
  // Allocates the pages of the first `end_bytes` now. Errors: kConfig (beyond the size); kCapacity
  // (the kernel refuses). On a kernel before 5.14, pages are allocated only when they are touched.
  // One thread at a time.
  Status reserve(size_t end_bytes);
  // True if the kernel accepted the wished NUMA node, or all of them; a seccomp filter, as
  // containers have, may refuse.
  bool has_node() const { return has_node_; }

 private:
  AlignedBuffer(uint8_t* data, size_t size_bytes, size_t mapped_bytes, PageKind page_kind,
                bool has_node)
      : data_(data),
        size_bytes_(size_bytes),
        mapped_bytes_(mapped_bytes),
        reserved_bytes_(page_kind == PageKind::kHugetlb ? size_bytes : 0),
        page_kind_(page_kind),
        has_node_(has_node) {}

  uint8_t* data_ = nullptr;
  size_t size_bytes_ = 0;
  size_t mapped_bytes_ = 0;
  size_t reserved_bytes_ = 0;
  PageKind page_kind_ = PageKind::kBase;
  bool has_node_ = false;
};

// The NUMA node of the page at `data`, which must have been touched. Errors: kUnsupported (the kernel
// does not say; describes why).
Result<int> find_page_node(const void* data);

}  // namespace tandem
