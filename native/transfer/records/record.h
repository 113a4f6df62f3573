// Records: the stream of a connection in pieces, each with a sequence number and a keyed tag. The
// layer above (Connection) sees bytes only after the tag of their record was checked, so that no
// byte is parsed, stored or confirmed unless the holder of the key sent it, in this order.
//
// A record is `size u32, sequence u32, bytes, tag 16 bytes`, little-endian. The tag covers all
// before it, under the full number of the record in its direction, which both ends count. So a
// record that is altered, lost, repeated, moved, or of another connection is an error, after which
// nothing more is read.
//
// Not thread-safe: the connection's mutex guards both classes.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transfer/records/tag.h"

namespace tandem::transfer {

inline constexpr size_t kRecordHeaderBytes = 8;
// Limit of bytes in a record: large enough that the tag costs little, small enough that both copies
// stay in a cache.
inline constexpr size_t kMaxRecordBytes = 64 << 10;

class RecordWriter {
 public:
  // `tagger` is not null.
  explicit RecordWriter(std::unique_ptr<Tagger> tagger) : tagger_(std::move(tagger)) {}

  // Copies the beginning of `parts` into records, at most 256 KiB, and tags them. The copy is sent,
  // so that memory that changes meanwhile cannot make the tag wrong. Returns the number of bytes
  // taken; 0 if the tagger failed. REQUIRES: is_empty(); the parts have bytes.
  size_t seal(const iovec* parts, int num_parts);
  bool is_empty() const { return begin_ == end_; }
  // The next bytes to send.
  const uint8_t* data() const { return buffer_.data() + begin_; }
  size_t size() const { return end_ - begin_; }
  void on_sent(size_t size) { begin_ += size; }

 private:
  const std::unique_ptr<Tagger> tagger_;
  uint64_t sequence_ = 0;
  std::vector<uint8_t> buffer_;  // Grows to what was sent at a time.
  size_t begin_ = 0;
  size_t end_ = 0;
};

class RecordReader {
 public:
  // `tagger` is not null.
  explicit RecordReader(std::unique_ptr<Tagger> tagger);

  // Returns the memory for the next bytes of the stream, and its size, which is never 0. REQUIRES:
  // !has_more().
  std::pair<uint8_t*, size_t> space();
  void add(size_t size) { end_ += size; }
  // True if there are opened bytes, or a whole record.
  bool has_more() const { return opened_ < opened_end_ || has_record(); }
  // Copies opened bytes, and returns their number.
  size_t take(uint8_t* to, size_t size);
  // Opens the next record if all of it has arrived; returns false if not. Errors: kPermissionDenied
  // (size, sequence or tag is wrong); nothing may be read after that. REQUIRES: `take` has returned
  // all opened bytes.
  Result<bool> open();

 private:
  bool has_record() const;

  const std::unique_ptr<Tagger> tagger_;
  uint64_t sequence_ = 0;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0;  // Of the next record.
  size_t end_ = 0;
  size_t opened_ = 0;  // Of the last one opened: what is still to be taken.
  size_t opened_end_ = 0;
};

}  // namespace tandem::transfer
