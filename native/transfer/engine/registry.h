// The table of this process's registered buffers, with the access rights of peers.
//
// Every buffer gets a range of the segment's address space, [base, base + length), that is never
// reused: an offset kept from before an unregister, or a wrong one, meets no other buffer.
//
// A pin keeps a buffer's bytes in place: `close` refuses new pins and `wait_unpinned` returns when
// the last is gone. Threads: any; the mutex is a leaf.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_annotations.h"
#include "transfer/memory/mapped_file.h"
#include "transfer/memory/shared_memory.h"
#include "transfer/wire/wire.h"

namespace tandem::transfer {

struct BufferSpec {
  uint8_t* data = nullptr;
  uint64_t length = 0;
  std::string name;  // Unique among the registered; may be empty.
  std::string location = "*";
  bool is_writable = true;         // By this process: a READ may put bytes here.
  bool can_remote_read = true;
  bool can_remote_write = true;
  std::shared_ptr<SharedMemory> memory = nullptr;  // Of an allocated buffer: peers may map it.
  FileRange file = {};  // Of a buffer that maps a file; fd < 0: none.
};

class Registry {
 public:
  struct Entry {
    BufferSpec spec;
    uint64_t base = 0;
    // Both are guarded by Registry::mutex_, which cannot be named here.
    bool is_closing = false;
    int num_pins = 0;
  };

  // Keeps a buffer's bytes in place while the pin exists.
  class Pin {
   public:
    Pin() = default;
    Pin(Registry* registry, std::shared_ptr<Entry> entry)
        : registry_(registry), entry_(std::move(entry)) {}
    Pin(Pin&& other) noexcept : registry_(other.registry_), entry_(std::move(other.entry_)) {}
    Pin& operator=(Pin&& other) noexcept {
      reset();
      registry_ = other.registry_;
      entry_ = std::move(other.entry_);
      return *this;
    }
    ~Pin() { reset(); }
    void reset() {
      if (entry_) registry_->unpin(*entry_);
      entry_.reset();
    }
    explicit operator bool() const { return entry_ != nullptr; }
    const Entry& entry() const { return *entry_; }

   private:
    Registry* registry_ = nullptr;
    std::shared_ptr<Entry> entry_;
  };

  enum class Access { kLocalRead, kLocalWrite, kRemoteRead, kRemoteWrite };

  // Adds a buffer. Errors: kConfig (no bytes); kConflict (name taken); kCapacity (too many).
  Result<uint64_t> add(BufferSpec spec);
  // Pins the bytes [offset, offset + length) of the segment. Errors: kNotFound (no buffer there, or
  // it is closing); kConfig (beyond the buffer's end or its reserved part); kPermissionDenied.
  Result<Pin> pin(uint64_t offset, uint64_t length, Access access);
  // Pins the buffer at an offset, if peers may reach it. Errors: kNotFound.
  Result<Pin> pin_remote(uint64_t offset);
  // Refuses new pins of a buffer from now on. Errors: kNotFound.
  Status close(uint64_t base);
  // Waits until a buffer has no pins; returns false at the deadline (monotonic nanoseconds).
  bool wait_unpinned(uint64_t base, int64_t deadline_ns);
  void remove(uint64_t base);

  std::vector<uint64_t> bases() const;
  // Returns the buffers that peers may reach, as told to peers.
  std::vector<BufferInfo> describe() const;

 private:
  friend class Pin;
  void unpin(Entry& entry);

  mutable Mutex mutex_;
  CondVar unpinned_;
  std::map<uint64_t, std::shared_ptr<Entry>> entries_ GUARDED_BY(mutex_);  // By base.
  std::set<std::string> names_ GUARDED_BY(mutex_);
  uint64_t next_base_ GUARDED_BY(mutex_) = uint64_t{1} << 20;
};

}  // namespace tandem::transfer
