#include "transfer/rails/nic_quota.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <limits>
#include <vector>

#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

constexpr uint64_t kBoardMagic = 0x31'41'54'4F'55'51'44'54;  // "TDQUOTA1"
constexpr size_t kNumSlots = 64;
// Age after which a slot that its owner has not written (stopped, suspended) has no claim.
constexpr int64_t kStaleNs = 500'000'000;
// Weight of the last sample in the smoothed rate: a time constant of 60 ms.
constexpr double kSmooth = 0.35;
// Factor above the recent rate that is handed out, so that unused capacity is found: 1.04 every 60
// ms doubles the rate in a second. Shares are inaccurate by as much.
constexpr double kGrowth = 1.04;
// Longest backlog that is caught up: the delay of a sleeper on a busy machine. With 5 ms, two
// processes that woke 15 ms late limited each other to 0.07 of the NIC, since the capacity is
// estimated from what moved.
constexpr int64_t kBurstNs = 40'000'000;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

bool is_name(const std::string& name) {
  return !name.empty() && name.size() <= 100 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

}  // namespace

// Layout of the file, with the version in its magic. A file of zeros is an empty board.
struct NicQuota::Board {
  struct Slot {
    // The pid in the low half, low bits of the start time in the high half; 0 for a free slot.
    std::atomic<uint64_t> owner;
    std::atomic<uint64_t> start_time;
    std::atomic<uint64_t> weight;    // Bits of a double, as the next two.
    std::atomic<uint64_t> demand;    // Bytes per second; infinity: as much as it can get.
    std::atomic<uint64_t> moved;     // Bytes per second, lately.
    std::atomic<int64_t> written_ns;  // Monotonic, one clock for the host.
    uint64_t reserved[2];
  };
  std::atomic<uint64_t> magic;
  uint64_t reserved[7];
  Slot slots[kNumSlots];

  static bool is_dead(const Slot& slot, uint64_t owner) {
    ProcessId process;
    process.pid = static_cast<uint32_t>(owner);
    process.start_time = slot.start_time.load();
    // A slot that is being claimed has no start time yet; leave it alone.
    return process.start_time != 0 && !is_alive(process);
  }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

Result<std::shared_ptr<NicQuota>> NicQuota::join(const std::string& name, double weight,
                                                 const ProcessId& process,
                                                 const std::string& folder) {
  if (!is_name(name) || !(weight > 0) || !std::isfinite(weight))
    return Error{Code::kConfig, "transfer.quota", "a board '" + name + "', weight " +
                     std::to_string(weight) + ": give a plain name and a weight above 0", ""};
  const std::string path =
      folder + "/tandem-" + std::to_string(getuid()) + "-" + name;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0)
    return Error{errno == EACCES || errno == ELOOP ? Code::kPermissionDenied : Code::kCapacity,
                 "transfer.quota", path + ": " + describe_errno("open", errno), ""};
  struct stat info{};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != getuid() ||
      (info.st_mode & 077) != 0) {
    close(fd);
    return Error{Code::kPermissionDenied, "transfer.quota",
                 path + " is not ours alone: remove it", ""};
  }
  void* mapped = MAP_FAILED;
  // All first users give the file the same length, so that their order does not matter.
  if (static_cast<size_t>(info.st_size) >= sizeof(Board) || ftruncate(fd, sizeof(Board)) == 0)
    mapped = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    close(fd);
    return Error{Code::kCapacity, "transfer.quota", path + ": " + describe_errno("mmap", errno),
                 ""};
  }
  Board* board = static_cast<Board*>(mapped);
  uint64_t magic = 0;
  if (!board->magic.compare_exchange_strong(magic, kBoardMagic) && magic != kBoardMagic) {
    munmap(mapped, sizeof(Board));
    close(fd);
    return Error{Code::kUnsupported, "transfer.quota", path + " has another layout: remove it", ""};
  }
  const uint64_t self = process.pid | (process.start_time << 32);
  for (size_t i = 0; i < kNumSlots; ++i) {
    Board::Slot& slot = board->slots[i];
    uint64_t owner = slot.owner.load();
    if (owner != 0 && !Board::is_dead(slot, owner)) continue;
    if (!slot.owner.compare_exchange_strong(owner, self)) continue;
    slot.demand.store(0);
    slot.moved.store(0);
    slot.weight.store(std::bit_cast<uint64_t>(weight));
    slot.written_ns.store(0);
    slot.start_time.store(process.start_time);
    return std::shared_ptr<NicQuota>(new NicQuota(board, fd, i, weight, process));
  }
  munmap(mapped, sizeof(Board));
  close(fd);
  return Error{Code::kCapacity, "transfer.quota", path + ": 64 processes share this NIC already",
               ""};
}

NicQuota::NicQuota(Board* board, int fd, size_t slot, double weight, const ProcessId& process)
    : board_(board),
      fd_(fd),
      slot_(slot),
      weight_(weight),
      process_(process),
      rate_(kUnlimited) {}

NicQuota::~NicQuota() {
  // A forked child leaves its parent's slot alone.
  if (process_.pid == static_cast<uint32_t>(getpid())) {
    board_->slots[slot_].start_time.store(0);
    board_->slots[slot_].owner.store(0);
  }
  munmap(board_, sizeof(Board));
  close(fd_);
}

double NicQuota::rate() const {
  const MutexLock lock(mutex_);
  return rate_;
}

void NicQuota::add_moved(uint64_t bytes, int64_t now_ns) {
  const MutexLock lock(mutex_);
  moved_bytes_ += bytes;
  refresh(now_ns);
}

void NicQuota::note_backlog(int64_t now_ns) {
  const MutexLock lock(mutex_);
  backlog_ns_ = now_ns;
  refresh(now_ns);
}

int64_t NicQuota::spend(uint64_t bytes, int64_t now_ns) {
  const MutexLock lock(mutex_);
  refresh(now_ns);
  if (rate_ == kUnlimited) {
    next_ns_ = now_ns;
    return now_ns;
  }
  const double cost_ns = static_cast<double>(bytes) / rate_ * 1e9;
  next_ns_ = std::max(next_ns_, now_ns - kBurstNs) + static_cast<int64_t>(cost_ns);
  return next_ns_;
}

void NicQuota::refresh(int64_t now_ns) {
  const int64_t elapsed_ns = now_ns - refreshed_ns_;
  if (elapsed_ns < kRefreshNs) return;
  const double sample = static_cast<double>(moved_bytes_) / static_cast<double>(elapsed_ns) * 1e9;
  // After a pause the rate is unknown; one period without a limit measures it.
  const bool is_resumed = elapsed_ns > 10 * kRefreshNs;
  moved_per_s_ = is_fresh_ ? sample : moved_per_s_ + kSmooth * (sample - moved_per_s_);
  if (is_resumed) moved_per_s_ = 0;
  is_fresh_ = is_resumed;
  moved_bytes_ = 0;
  refreshed_ns_ = now_ns;
  const bool has_backlog = now_ns - backlog_ns_ < 2 * kRefreshNs;

  Board::Slot& own = board_->slots[slot_];
  own.demand.store(std::bit_cast<uint64_t>(has_backlog ? kUnlimited : moved_per_s_));
  own.moved.store(std::bit_cast<uint64_t>(moved_per_s_));
  own.written_ns.store(now_ns);

  double total = moved_per_s_;
  std::vector<ShareClaim> claims{{weight_, 0}};
  for (size_t i = 0; i < kNumSlots; ++i) {
    const Board::Slot& slot = board_->slots[i];
    const uint64_t owner = slot.owner.load();
    if (i == slot_ || owner == 0 || now_ns - slot.written_ns.load() > kStaleNs) continue;
    const double weight = std::bit_cast<double>(slot.weight.load());
    const double demand = std::bit_cast<double>(slot.demand.load());
    const double moved = std::bit_cast<double>(slot.moved.load());
    // Values of other processes are untrusted input, and must not make a share invalid.
    if (!(weight > 0) || !std::isfinite(weight) || !(demand > 0) || !(moved >= 0) ||
        !std::isfinite(moved) || Board::is_dead(slot, owner))
      continue;
    claims.push_back({weight, demand});
    total += moved;
  }
  if (claims.size() == 1 || is_fresh_) {
    rate_ = kUnlimited;
    return;
  }
  const double capacity = kGrowth * total;
  // Replace infinite demands by twice the capacity, to keep infinity out of the arithmetic.
  for (ShareClaim& claim : claims) claim.demand = std::min(claim.demand, 2 * capacity);
  claims[0].demand = 2 * capacity;
  rate_ = capacity > 0 ? split_capacity(capacity, claims)[0] : kUnlimited;
}

}  // namespace tandem::transfer
