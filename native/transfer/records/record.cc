#include "transfer/records/record.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace tandem::transfer {
namespace {

constexpr size_t kMaxWholeBytes = kRecordHeaderBytes + kMaxRecordBytes + kTagBytes;
// Limit of the records in one system call, so that both ends' buffers stay in a second-level cache.
constexpr size_t kMaxTurnRecords = 4;
constexpr size_t kFirstBufferBytes = 4 << 10;

void put_u32(uint8_t* out, uint32_t value) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}

uint32_t get_u32(const uint8_t* in) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= uint32_t{in[i]} << (8 * i);
  return value;
}

Error refused(const std::string& what) {
  return {Code::kPermissionDenied, "transfer.open_record",
          what + ": what lies between the two ends alters what they send", ""};
}

}  // namespace

size_t RecordWriter::seal(const iovec* parts, int num_parts) {
  size_t wanted = 0;
  for (int i = 0; i < num_parts; ++i) wanted += parts[i].iov_len;
  wanted = std::min(wanted, kMaxTurnRecords * kMaxRecordBytes);
  const size_t num_records = (wanted + kMaxRecordBytes - 1) / kMaxRecordBytes;
  const size_t whole = wanted + num_records * (kRecordHeaderBytes + kTagBytes);
  if (buffer_.size() < whole) buffer_.resize(whole);
  begin_ = end_ = 0;
  size_t part_done = 0;
  for (size_t left = wanted; left > 0;) {
    const size_t size = std::min(left, kMaxRecordBytes);
    uint8_t* const record = buffer_.data() + end_;
    put_u32(record, static_cast<uint32_t>(size));
    put_u32(record + 4, static_cast<uint32_t>(sequence_));
    uint8_t* to = record + kRecordHeaderBytes;
    for (size_t missing = size; missing > 0;) {
      const size_t count = std::min(missing, parts->iov_len - part_done);
      std::memcpy(to, static_cast<const uint8_t*>(parts->iov_base) + part_done, count);
      to += count;
      missing -= count;
      part_done += count;
      if (part_done < parts->iov_len) continue;
      ++parts;
      part_done = 0;
    }
    if (!tagger_->make(sequence_, record, kRecordHeaderBytes + size, to)) {
      end_ = 0;
      return 0;
    }
    ++sequence_;
    end_ += kRecordHeaderBytes + size + kTagBytes;
    left -= size;
  }
  return wanted;
}

RecordReader::RecordReader(std::unique_ptr<Tagger> tagger)
    : tagger_(std::move(tagger)), buffer_(kFirstBufferBytes) {}

std::pair<uint8_t*, size_t> RecordReader::space() {
  // Move the rest, which is less than a record, to the front.
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  const bool is_busy = end_ == buffer_.size();
  end_ -= begin_;
  begin_ = opened_ = opened_end_ = 0;
  // Idle connections keep a small buffer; one that was filled grows.
  if (is_busy)
    buffer_.resize(std::min(4 * buffer_.size(), kMaxTurnRecords * kMaxWholeBytes));
  return {buffer_.data() + end_, buffer_.size() - end_};
}

bool RecordReader::has_record() const {
  if (end_ - begin_ < kRecordHeaderBytes) return false;
  const size_t size = get_u32(buffer_.data() + begin_);
  // Report an impossible size as a whole record, so that opening it fails instead of waiting for
  // more bytes.
  return size > kMaxRecordBytes || end_ - begin_ >= kRecordHeaderBytes + size + kTagBytes;
}

size_t RecordReader::take(uint8_t* to, size_t size) {
  const size_t part = std::min(size, opened_end_ - opened_);
  if (part > 0) std::memcpy(to, buffer_.data() + opened_, part);
  opened_ += part;
  return part;
}

Result<bool> RecordReader::open() {
  if (!has_record()) return false;
  const uint8_t* const record = buffer_.data() + begin_;
  const size_t size = get_u32(record);
  if (size == 0 || size > kMaxRecordBytes)
    return refused("a record of " + std::to_string(size) + " bytes");
  if (get_u32(record + 4) != static_cast<uint32_t>(sequence_))
    return refused("record " + std::to_string(get_u32(record + 4)) + " in place of " +
                   std::to_string(static_cast<uint32_t>(sequence_)));
  const size_t covered = kRecordHeaderBytes + size;
  uint8_t tag[kTagBytes];
  if (!tagger_->make(sequence_, record, covered, tag) ||
      !equal_in_constant_time({reinterpret_cast<const char*>(tag), kTagBytes},
                              {reinterpret_cast<const char*>(record + covered), kTagBytes}))
    return refused("a record with a wrong tag");
  ++sequence_;
  opened_ = begin_ + kRecordHeaderBytes;
  opened_end_ = opened_ + size;
  begin_ += covered + kTagBytes;
  return true;
}

}  // namespace tandem::transfer
