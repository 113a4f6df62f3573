// The routed experts of one layer, with packed weights, on the CPU.
//
// Owns the packed weights of E SwiGLU experts: y = down(silu(gate(x)) * up(x)). forward() runs two
// parallel loops, three for many tokens: (code the input,) gate and up by (expert, columns, rows),
// down by columns over all experts. A token's output sums its experts in ascending order of their
// ids, so it does not depend on what else is in the batch, nor on the threads.
//
// Threads: forward() may be called by several threads at once; pack() of different experts as well,
// but not of an expert that forward() uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "kernels/isa.h"
#include "kernels/packing.h"
#include "kernels/weight_format.h"

namespace tandem {

class ExpertBank {
 public:
  // Memory of somebody else for the packed weights, kept alive by whoever derives from it.
  struct Storage {
    virtual ~Storage() = default;
    uint8_t* data = nullptr;  // 64-byte aligned.
    size_t size_bytes = 0;
    bool is_writable = false;
  };

  struct Config {
    WeightFormat format;
    size_t num_experts = 0;
    size_t hidden_size = 0;
    size_t intermediate_size = 0;
    std::string_view isa;  // Empty: the widest here.
    // Packed weights that lie elsewhere, such as a mapped file; none: memory of our own, zeroed.
    std::shared_ptr<const Storage> storage;
  };

  // Everything borrowed for the call.
  struct Batch {
    const void* x = nullptr;  // [num_tokens, hidden_size], fp32 or bf16.
    bool is_bf16 = false;
    size_t num_tokens = 0;
    const void* expert_ids = nullptr;  // [num_tokens, top_k] in [-1, num_experts), int32 or int64.
    bool has_int64_ids = false;
    size_t top_k = 0;
    const float* weights = nullptr;  // [num_tokens, top_k]
    float* out = nullptr;            // [num_tokens, hidden_size], overwritten.
  };

  // Errors: kUnsupported (format, ISA not here), kShape (sizes that are not whole groups), kConfig
  // (ISA name, no experts), kCapacity (memory).
  static Result<ExpertBank> create(const Config& config);
  // Bytes of storage that create() needs for this configuration. Errors: as create.
  static Result<size_t> count_bytes(const Config& config);

  // Codes one expert. Errors: kShape, kNotFound (expert), kUnsupported (weights that the format
  // cannot hold), kConflict (read-only storage), those of ThreadPool.
  Status pack(ThreadPool& pool, size_t expert_id, const MatrixView& gate, const MatrixView& up,
              const MatrixView& down);

  // Errors: kShape (an expert id; `out` is then untouched), those of ThreadPool.
  Status forward(ThreadPool& pool, const Batch& batch) const;

  // What a call could reach at best, for benchmarks: reads the packed bytes of the first
  // `num_experts` experts; performs as many multiply-adds with the format's dot product.
  // REQUIRES: num_experts <= num_experts().
  Status read_weights(ThreadPool& pool, size_t num_experts) const;
  Status multiply_registers(ThreadPool& pool, size_t num_macs) const;

  const WeightFormat& format() const { return format_; }
  Isa isa() const { return isa_; }
  size_t num_experts() const { return num_experts_; }
  size_t hidden_size() const { return hidden_size_; }
  size_t intermediate_size() const { return intermediate_size_; }
  // Packed bytes of one expert, scales included.
  size_t expert_bytes() const { return gate_up_bytes_ + down_bytes_; }
  // Experts one after the other; each: gate and up panels in turn, then down panels.
  uint8_t* data() const { return data_; }
  bool is_writable() const { return !storage_ || storage_->is_writable; }

 private:
  struct Routing;
  struct Scratch;

  ExpertBank() = default;
  // A bank with all sizes, without memory.
  static Result<ExpertBank> plan(const Config& config);
  Result<Routing> route(const Batch& batch) const;
  Status run_gate_up(ThreadPool& pool, const Routing& routing, const Scratch& scratch) const;
  Status run_down(ThreadPool& pool, const Routing& routing, const Scratch& scratch,
                  const Batch& batch) const;
  size_t panels_per_block() const;

  WeightFormat format_{};
  Isa isa_ = Isa::kPlain;
  const struct ExpertKernels* kernels_ = nullptr;
  size_t num_experts_ = 0;
  size_t hidden_size_ = 0;
  size_t intermediate_size_ = 0;
  size_t hidden_panel_bytes_ = 0;        // A panel over the hidden size: of gate or up.
  size_t intermediate_panel_bytes_ = 0;  // A panel of down.
  size_t num_gate_panels_ = 0;           // Whole blocks.
  size_t num_down_panels_ = 0;
  size_t gate_up_bytes_ = 0;
  size_t down_bytes_ = 0;
  uint8_t* data_ = nullptr;  // Of one of these two.
  std::unique_ptr<AlignedBuffer> own_;
  std::shared_ptr<const Storage> storage_;
};

}  // namespace tandem
