#include "base/aligned_buffer.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "base/pages.h"
#include "base/machine/topology.h"

#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

namespace tandem {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr int kHuge2MiB = 21 << MAP_HUGE_SHIFT;  // log2(2 MiB), whatever the default size is.
constexpr int kMpolPreferred = 1;                // linux/mempolicy.h
constexpr const char* kWhere = "buffer.allocate";

size_t page_size_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

uint8_t* map_anonymous(size_t size_bytes, int extra_flags) {
  void* at = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<uint8_t*>(at);
}

// Asks for a NUMA node as best effort, as the policy itself is only a preference: a seccomp filter
// may refuse the call.
bool prefer_node(uint8_t* data, size_t size_bytes, int node_id) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node_id) / kBits + 1, 0);
  mask[static_cast<size_t>(node_id) / kBits] = 1UL << (static_cast<size_t>(node_id) % kBits);
  // Pass one bit more than the mask has, since mbind reads one bit less than it is told.
  return syscall(SYS_mbind, data, size_bytes, kMpolPreferred, mask.data(),
                 mask.size() * kBits + 1, 0) == 0;
}

std::vector<NodeShare> list_shares(size_t size_bytes, const AlignedBuffer::Options& options) {
  if (options.numa_node) return {{size_bytes, *options.numa_node}};
  return options.node_shares;
}

bool prefer_nodes(uint8_t* data, size_t mapped_bytes, size_t page_bytes,
                  const std::vector<NodeShare>& shares) {
  bool is_granted = !shares.empty();
  size_t begin = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    const size_t nearest = (shares[i].end_bytes + page_bytes / 2) / page_bytes * page_bytes;
    const size_t end = i + 1 == shares.size() ? mapped_bytes : std::min(nearest, mapped_bytes);
    if (end > begin) is_granted &= prefer_node(data + begin, end - begin, shares[i].node_id);
    begin = std::max(begin, end);
  }
  return is_granted;
}

// Preallocated pages are taken now, not at the first touch: where a control group or a cpuset
// refuses them, the touch would be a SIGBUS, whereas populating is an error to fall back from.
uint8_t* map_hugetlb(size_t size_bytes, const std::vector<NodeShare>& shares, bool* has_node) {
  uint8_t* data = map_anonymous(size_bytes, MAP_HUGETLB | kHuge2MiB);
  if (data == nullptr) return nullptr;
  *has_node = prefer_nodes(data, size_bytes, kHugePageBytes, shares);
  if (populate_pages(data, size_bytes) == 0) return data;
  munmap(data, size_bytes);
  return nullptr;
}

// Maps 2 MiB more than needed and trims to a 2 MiB border; otherwise the first and last pages would
// be small ones.
uint8_t* map_huge_aligned(size_t size_bytes) {
  uint8_t* wide = map_anonymous(size_bytes + kHugePageBytes, 0);
  if (wide == nullptr) return nullptr;
  const size_t lead = round_up(reinterpret_cast<uintptr_t>(wide), kHugePageBytes) -
                      reinterpret_cast<uintptr_t>(wide);
  if (lead > 0) munmap(wide, lead);
  if (lead < kHugePageBytes) munmap(wide + lead + size_bytes, kHugePageBytes - lead);
  return wide + lead;
}

Status check_arguments(size_t size_bytes, const AlignedBuffer::Options& options) {
  if (size_bytes == 0)
    return Status(Code::kConfig, kWhere, "size is 0: ask for at least one byte", "size_bytes");
  const size_t memory_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_size_bytes();
  // Check the size here: a kernel that overcommits would grant the mapping, and end the process
  // when it touches the memory.
  if (size_bytes > memory_bytes)
    return Status(Code::kCapacity, kWhere,
                  std::to_string(size_bytes) + " bytes asked, the machine has " +
                      std::to_string(memory_bytes) + ": ask for less",
                  "size_bytes");
  const std::vector<NodeShare> shares = list_shares(size_bytes, options);
  if (shares.empty()) return {};
  const Topology topology = read_topology();
  const std::vector<NumaNode>& nodes = topology.numa_nodes;
  for (const NodeShare& share : shares) {
    const auto is_node = [&](const NumaNode& node) { return node.node_id == share.node_id; };
    if (std::any_of(nodes.begin(), nodes.end(), is_node)) continue;
    std::string known;
    for (const NumaNode& node : nodes)
      known += (known.empty() ? "" : ", ") + std::to_string(node.node_id);
    return Status(Code::kNotFound, kWhere,
                  "NUMA node " + std::to_string(share.node_id) +
                      " is not usable by this process: choose one of " + known,
                  "numa_node");
  }
  return {};
}

}  // namespace

Result<AlignedBuffer> AlignedBuffer::allocate(size_t size_bytes, const Options& options) {
  if (Status status = check_arguments(size_bytes, options); !status.is_ok()) return status.error();
  const size_t mapped_bytes =
      round_up(size_bytes, options.hugepages ? kHugePageBytes : page_size_bytes());
  const std::vector<NodeShare> shares = list_shares(size_bytes, options);
  bool has_node = false;
  if (options.hugepages) {
    if (uint8_t* data = map_hugetlb(mapped_bytes, shares, &has_node))
      return AlignedBuffer(data, size_bytes, mapped_bytes, PageKind::kHugetlb, has_node);
  }
  uint8_t* data =
      options.hugepages ? map_huge_aligned(mapped_bytes) : map_anonymous(mapped_bytes, 0);
  if (data == nullptr)
    return Error{Code::kCapacity, kWhere,
                 std::to_string(size_bytes) + " bytes refused, " + describe_errno("mmap", errno) +
                     ": ask for less or raise the limit",
                 "size_bytes"};
  const size_t page_bytes = options.hugepages ? kHugePageBytes : page_size_bytes();
  has_node = prefer_nodes(data, mapped_bytes, page_bytes, shares);
  PageKind kind = PageKind::kBase;
  if (options.hugepages) {
    // The advice is accepted even where the setting "never" makes it void.
    const std::string setting = read_hugepage_state().transparent;
    const bool is_enabled = setting == "always" || setting == "madvise";
    if (madvise(data, mapped_bytes, MADV_HUGEPAGE) == 0 && is_enabled)
      kind = PageKind::kTransparent;
  }
  return AlignedBuffer(data, size_bytes, mapped_bytes, kind, has_node);
}

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(reserved_bytes_, other.reserved_bytes_);
  std::swap(page_kind_, other.page_kind_);
  std::swap(has_node_, other.has_node_);
  return *this;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ != nullptr) munmap(data_, mapped_bytes_);
}

Status AlignedBuffer::reserve(size_t end_bytes) {
  if (end_bytes > size_bytes_)
    return {Code::kConfig, "buffer.reserve",
            std::to_string(end_bytes) + " bytes of " + std::to_string(size_bytes_), "end_bytes"};
  if (end_bytes <= reserved_bytes_) return {};
  const size_t wanted = end_bytes - reserved_bytes_;
  const int error = populate_pages(data_ + reserved_bytes_, wanted);
  if (error != 0 && error != EINVAL)
    return {Code::kCapacity, "buffer.reserve",
            std::to_string(wanted) + " bytes: " + describe_errno("madvise", error), "end_bytes"};
  reserved_bytes_ = end_bytes;
  return {};
}

Result<int> find_page_node(const void* data) {
  // move_pages without target nodes moves nothing and tells where each page lies.
  const uintptr_t page_bytes = page_size_bytes();
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) / page_bytes * page_bytes);
  int node_id = -1;
  if (syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node_id, 0) == 0 && node_id >= 0)
    return node_id;
  const int error = node_id < -1 ? -node_id : errno;
  return Error{Code::kUnsupported, "buffer.find_page_node", describe_errno("move_pages", error), ""};
}

}  // namespace tandem
