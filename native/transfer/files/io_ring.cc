#include "transfer/files/io_ring.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define TANDEM_HAS_IO_URING 1
#endif

namespace tandem::transfer {

#ifdef TANDEM_HAS_IO_URING
namespace {

constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr uint64_t kWakeTag = ~uint64_t{0};

uint32_t load_acquire(const uint32_t* from) {
  return std::atomic_ref(*const_cast<uint32_t*>(from)).load(std::memory_order_acquire);
}

void store_release(uint32_t* to, uint32_t value) {
  std::atomic_ref(*to).store(value, std::memory_order_release);
}

}  // namespace

struct IoRing::Rings {
  int fd = -1;
  int wake_fd = -1;
  io_uring_params params{};
  uint8_t* sq = nullptr;
  uint8_t* cq = nullptr;
  size_t sq_bytes = 0;
  size_t cq_bytes = 0;
  io_uring_sqe* sqes = nullptr;

  ~Rings() {
    if (sqes != nullptr) munmap(sqes, params.sq_entries * sizeof(io_uring_sqe));
    if (cq != nullptr && cq != sq) munmap(cq, cq_bytes);
    if (sq != nullptr) munmap(sq, sq_bytes);
    if (fd >= 0) close(fd);
    if (wake_fd >= 0) close(wake_fd);
  }

  uint32_t* sq_word(uint32_t offset) const { return reinterpret_cast<uint32_t*>(sq + offset); }
  uint32_t* cq_word(uint32_t offset) const { return reinterpret_cast<uint32_t*>(cq + offset); }
  uint8_t* map(size_t size, uint64_t at) const {
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                        static_cast<off_t>(at));
    return mapped == MAP_FAILED ? nullptr : static_cast<uint8_t*>(mapped);
  }
};

Result<std::unique_ptr<IoRing>> IoRing::create(uint32_t depth) {
  auto rings = std::make_unique<Rings>();
  io_uring_params& params = rings->params;
  // One more entry for the wake-up.
  rings->fd = static_cast<int>(syscall(kSetup, depth + 1, &params));
  if (rings->fd < 0)
    return Error{errno == ENOMEM || errno == EMFILE ? Code::kCapacity : Code::kUnsupported,
                 "transfer.file", describe_errno("io_uring_setup", errno), ""};
  rings->sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  rings->cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const bool is_single = params.features & IORING_FEAT_SINGLE_MMAP;
  if (is_single) rings->sq_bytes = rings->cq_bytes = std::max(rings->sq_bytes, rings->cq_bytes);
  rings->sq = rings->map(rings->sq_bytes, IORING_OFF_SQ_RING);
  rings->cq = is_single ? rings->sq : rings->map(rings->cq_bytes, IORING_OFF_CQ_RING);
  rings->sqes = reinterpret_cast<io_uring_sqe*>(
      rings->map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  rings->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (rings->sq == nullptr || rings->cq == nullptr || rings->sqes == nullptr || rings->wake_fd < 0)
    return Error{Code::kCapacity, "transfer.file", describe_errno("mmap of io_uring", errno), ""};
  return std::unique_ptr<IoRing>(new IoRing(std::move(rings)));
}

void IoRing::push(uint8_t opcode, int fd, const iovec* iov, uint64_t offset, uint64_t tag) {
  const Rings& r = *rings_;
  uint32_t* tail_word = r.sq_word(r.params.sq_off.tail);
  const uint32_t tail = *tail_word;
  const uint32_t slot = tail & *r.sq_word(r.params.sq_off.ring_mask);
  io_uring_sqe& sqe = r.sqes[slot];
  std::memset(&sqe, 0, sizeof sqe);
  sqe.opcode = opcode;
  sqe.fd = fd;
  sqe.user_data = tag;
  if (iov != nullptr) {
    sqe.addr = reinterpret_cast<uint64_t>(iov);
    sqe.len = 1;
    sqe.off = offset;
  } else {
    sqe.poll_events = POLLIN;
  }
  r.sq_word(r.params.sq_off.array)[slot] = slot;
  store_release(tail_word, tail + 1);
  ++num_queued_;
}

void IoRing::prepare(bool is_write, int fd, const iovec* iov, uint64_t offset, uint64_t tag) {
  push(is_write ? IORING_OP_WRITEV : IORING_OP_READV, fd, iov, offset, tag);
}

void IoRing::arm_wake() {
  if (is_wake_armed_) return;
  is_wake_armed_ = true;
  push(IORING_OP_POLL_ADD, rings_->wake_fd, nullptr, 0, kWakeTag);
}

Status IoRing::submit(uint32_t num_awaited) {
  arm_wake();
  const long done = syscall(kEnter, rings_->fd, num_queued_, num_awaited, IORING_ENTER_GETEVENTS,
                            nullptr, 0);
  if (done >= 0) {
    num_queued_ -= static_cast<uint32_t>(done);
    return {};
  }
  // After EAGAIN and EBUSY the kernel wants completions to be reaped first, which the caller does.
  if (errno == EINTR || errno == EAGAIN || errno == EBUSY) return {};
  return {Code::kInternal, "transfer.file", describe_errno("io_uring_enter", errno), ""};
}

Status IoRing::wait(int timeout_ms) {
  // A ring's descriptor is readable while completions wait.
  pollfd ready{rings_->fd, POLLIN, 0};
  if (poll(&ready, 1, timeout_ms) >= 0 || errno == EINTR) return {};
  return {Code::kInternal, "transfer.file", describe_errno("poll of io_uring", errno), ""};
}

bool IoRing::reap(Completion* completion) {
  const Rings& r = *rings_;
  uint32_t* head_word = r.cq_word(r.params.cq_off.head);
  const uint32_t head = *head_word;
  if (head == load_acquire(r.cq_word(r.params.cq_off.tail))) return false;
  const auto* cqes = reinterpret_cast<const io_uring_cqe*>(r.cq + r.params.cq_off.cqes);
  const io_uring_cqe& cqe = cqes[head & *r.cq_word(r.params.cq_off.ring_mask)];
  *completion = {cqe.user_data, cqe.res};
  store_release(head_word, head + 1);
  if (completion->tag != kWakeTag) return true;
  is_wake_armed_ = false;
  eventfd_t drained;
  eventfd_read(rings_->wake_fd, &drained);
  return reap(completion);
}

void IoRing::wake() { eventfd_write(rings_->wake_fd, 1); }

#else

struct IoRing::Rings {};

Result<std::unique_ptr<IoRing>> IoRing::create(uint32_t) {
  return Error{Code::kUnsupported, "transfer.file", "built without linux/io_uring.h", ""};
}
void IoRing::prepare(bool, int, const iovec*, uint64_t, uint64_t) {}
Status IoRing::submit(uint32_t) { return {}; }
Status IoRing::wait(int) { return {}; }
bool IoRing::reap(Completion*) { return false; }
void IoRing::wake() {}

#endif

IoRing::IoRing(std::unique_ptr<Rings> rings) : rings_(std::move(rings)) {}
IoRing::~IoRing() = default;

}  // namespace tandem::transfer
