#include "transfer/engine/registry.h"

#include <chrono>

namespace tandem::transfer {
namespace {

constexpr size_t kMaxBuffers = 1 << 20;
constexpr size_t kMaxName = 255;
// Bytes of unused addresses between two buffers, so that an access over a buffer's end is an error.
constexpr uint64_t kGap = 4096;
constexpr uint64_t kMaxLength = uint64_t{1} << 46;

bool is_allowed(const BufferSpec& spec, Registry::Access access) {
  switch (access) {
    case Registry::Access::kLocalRead: return true;
    case Registry::Access::kLocalWrite: return spec.is_writable;
    case Registry::Access::kRemoteRead: return spec.can_remote_read;
    case Registry::Access::kRemoteWrite: return spec.can_remote_write && spec.is_writable;
  }
  return false;
}

std::string describe_range(uint64_t offset, uint64_t length) {
  return "offset " + std::to_string(offset) + ", " + std::to_string(length) + " bytes";
}

}  // namespace

Result<uint64_t> Registry::add(BufferSpec spec) {
  if (spec.data == nullptr || spec.length == 0 || spec.length > kMaxLength)
    return Error{Code::kConfig, "transfer.register",
                 "a buffer of " + std::to_string(spec.length) + " bytes: give at least one",
                 "buffer"};
  if (spec.name.size() > kMaxName || spec.location.size() > kMaxName)
    return Error{Code::kConfig, "transfer.register",
                 "a name or location of more than " + std::to_string(kMaxName) + " bytes", "name"};
  const MutexLock lock(mutex_);
  if (entries_.size() >= kMaxBuffers)
    return Error{Code::kCapacity, "transfer.register",
                 std::to_string(kMaxBuffers) + " buffers are registered: unregister some", ""};
  if (!spec.name.empty() && !names_.insert(spec.name).second)
    return Error{Code::kConflict, "transfer.register",
                 "a buffer named '" + spec.name + "' is registered already", "name"};
  const uint64_t base = next_base_;
  next_base_ += (spec.length + 2 * kGap - 1) / kGap * kGap;
  auto entry = std::make_shared<Entry>();
  entry->spec = std::move(spec);
  entry->base = base;
  entries_.emplace(base, std::move(entry));
  return base;
}

Result<Registry::Pin> Registry::pin(uint64_t offset, uint64_t length, Access access) {
  const MutexLock lock(mutex_);
  auto after = entries_.upper_bound(offset);
  if (after == entries_.begin())
    return Error{Code::kNotFound, "transfer.access",
                 describe_range(offset, length) + ": no buffer is registered there", "offset"};
  const std::shared_ptr<Entry>& entry = std::prev(after)->second;
  const uint64_t inside = offset - entry->base;
  if (entry->is_closing || inside >= entry->spec.length)
    return Error{Code::kNotFound, "transfer.access",
                 describe_range(offset, length) + ": no buffer is registered there", "offset"};
  if (length > entry->spec.length - inside)
    return Error{Code::kConfig, "transfer.access",
                 describe_range(offset, length) + ": the buffer ends after " +
                     std::to_string(entry->spec.length - inside),
                 "length"};
  if (entry->spec.memory && inside + length > entry->spec.memory->reserved())
    return Error{Code::kConfig, "transfer.access",
                 describe_range(offset, length) + ": " +
                     std::to_string(entry->spec.memory->reserved()) +
                     " bytes of the buffer are reserved",
                 "offset"};
  if (!is_allowed(entry->spec, access))
    return Error{Code::kPermissionDenied, "transfer.access",
                 describe_range(offset, length) + ": registered without this right", "offset"};
  ++entry->num_pins;
  return Pin(this, entry);
}

Result<Registry::Pin> Registry::pin_remote(uint64_t offset) {
  Result<Pin> pinned = pin(offset, 1, Access::kRemoteRead);
  const bool is_write_only =
      !pinned.is_ok() && pinned.error().code == Code::kPermissionDenied;
  return is_write_only ? pin(offset, 1, Access::kRemoteWrite) : std::move(pinned);
}

void Registry::unpin(Entry& entry) {
  const MutexLock lock(mutex_);
  if (--entry.num_pins == 0 && entry.is_closing) unpinned_.notify_all();
}

Status Registry::close(uint64_t base) {
  const MutexLock lock(mutex_);
  const auto found = entries_.find(base);
  if (found == entries_.end())
    return {Code::kNotFound, "transfer.unregister",
            "no buffer is registered at offset " + std::to_string(base), "buffer"};
  found->second->is_closing = true;
  return {};
}

bool Registry::wait_unpinned(uint64_t base, int64_t deadline_ns) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(base);
  if (found == entries_.end()) return true;
  const std::shared_ptr<Entry> entry = found->second;
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  return unpinned_.wait_until(lock, deadline, [&] { return entry->num_pins == 0; });
}

void Registry::remove(uint64_t base) {
  const MutexLock lock(mutex_);
  const auto found = entries_.find(base);
  if (found == entries_.end()) return;
  names_.erase(found->second->spec.name);
  entries_.erase(found);
}

std::vector<uint64_t> Registry::bases() const {
  const MutexLock lock(mutex_);
  std::vector<uint64_t> bases;
  for (const auto& [base, entry] : entries_) bases.push_back(base);
  return bases;
}

std::vector<BufferInfo> Registry::describe() const {
  const MutexLock lock(mutex_);
  std::vector<BufferInfo> infos;
  for (const auto& [base, entry] : entries_) {
    const BufferSpec& spec = entry->spec;
    const bool can_write = is_allowed(spec, Access::kRemoteWrite);
    if (entry->is_closing || (!spec.can_remote_read && !can_write)) continue;
    infos.push_back({base, spec.length, spec.can_remote_read, can_write,
                     spec.memory != nullptr || spec.file.fd >= 0, spec.name, spec.location});
  }
  return infos;
}

}  // namespace tandem::transfer
