// Counts of what each transport has moved in each direction, for metrics. Counts only rise.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "transfer/memory/transport_kind.h"

namespace tandem::transfer {

// Threads: any. Relaxed: a reader sees each count as of some recent time.
struct TransferCounters {
  struct Way {
    std::atomic<uint64_t> bytes{0};
    std::atomic<uint64_t> parts{0};  // Slices, chunks: what was moved in one go.
  };
  std::array<std::array<Way, 2>, kTransportNames.size()> ways;  // [kind][op]
  // Number of pieces that a transport failed to move and another one moved.
  std::array<std::atomic<uint64_t>, kTransportNames.size()> failovers{};

  void add(TransportKind kind, int op, uint64_t bytes) {
    Way& way = ways[static_cast<size_t>(kind)][static_cast<size_t>(op)];
    way.bytes.fetch_add(bytes, std::memory_order_relaxed);
    way.parts.fetch_add(1, std::memory_order_relaxed);
  }
  void add_failover(TransportKind kind) {
    failovers[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
  }
};

// Latencies in buckets whose bounds rise by a quarter of an octave from one microsecond, so that
// quantiles are known within 19 %. Not thread-safe.
class LatencyHistogram {
 public:
  static constexpr int kPerOctave = 4;
  static constexpr size_t kNumBuckets = 27 * kPerOctave;  // The last one is open: above 2 minutes.

  void add(int64_t latency_ns) {
    const double us = static_cast<double>(latency_ns) / 1e3;
    const double octaves = us > 1 ? std::log2(us) : 0.0;
    const size_t bucket = static_cast<size_t>(std::ceil(octaves * kPerOctave));
    ++counts_[bucket < kNumBuckets ? bucket : kNumBuckets - 1];
    sum_ns_ += static_cast<uint64_t>(latency_ns > 0 ? latency_ns : 0);
  }
  // Upper bound of a bucket in seconds.
  static double bound_s(size_t bucket) {
    return 1e-6 * std::exp2(static_cast<double>(bucket) / kPerOctave);
  }
  const std::array<uint64_t, kNumBuckets>& counts() const { return counts_; }
  double sum_s() const { return static_cast<double>(sum_ns_) / 1e9; }

 private:
  std::array<uint64_t, kNumBuckets> counts_{};
  uint64_t sum_ns_ = 0;
};

}  // namespace tandem::transfer
