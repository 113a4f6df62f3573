// The routed experts of one layer, with packed weights, on the CPU.
//
// Owns the packed weights of E gated experts, y = down(f(gate(x)) * up(x)), or views those that lie
// in somebody's storage. forward() runs two parallel loops, three for many tokens: (code the input,)
// gate and up by (expert, columns, rows), down by columns over all experts. A token's output sums
// its experts in ascending order of their ids, so it does not depend on what else is in the batch,
// nor on the threads.
//
// Parts: the intermediate dimension may be split, so that every sub-pool of threads reads memory of
// its own node: part p is packed, and with that first touched, and computed by sub-pool
// p * nodes / parts. Each part sums its share of down over the experts; one more loop adds the
// parts in their order. Results depend on the number of parts, not on the nodes.
//
// Weights that lie apart: a bank made with `is_apart` has no memory. Each forward() brings the address
// of every expert that it computes, such as a slot of a cache over a disk, and may compute a range of
// them, in ascending order over several calls; the sum is bitwise that of one call.
//
// Threads: forward() may be called by several threads at once; pack() of different experts as well,
// but not of an expert that forward() uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/vectors/isa.h"
#include "kernels/packed/packed_kernels.h"
#include "kernels/weights/packing.h"
#include "kernels/weights/weight_format.h"
#include "kernels/weights/weight_memory.h"

namespace tandem {

class ExpertBank {
 public:
  using Storage = WeightStorage;

  struct Config {
    WeightFormat format;
    // Weight format of the down projections; none: that of gate and up. If the two differ, both are
    // integer formats.
    std::optional<WeightFormat> down_format;
    size_t num_experts = 0;
    size_t hidden_size = 0;
    size_t intermediate_size = 0;
    std::string_view isa;  // Empty: the widest here.
    // Memory with packed weights that somebody else owns, such as a mapped file; none: the bank has
    // its own memory, zeroed.
    std::shared_ptr<const Storage> storage;
    Activation activation;
    bool has_bias = false;
    size_t num_parts = 1;
    // NUMA node on which the bank's own memory of each part should lie; empty: the node of the
    // thread that touches it first.
    std::vector<int> part_nodes;
    // If true, the bank has no memory: forward() is given the address of each expert. Such a bank
    // has one part and no storage.
    bool is_apart = false;
  };

  // The arguments of forward(); all are borrowed for the call.
  struct Batch {
    const void* x = nullptr;  // [num_tokens, hidden_size], fp32 or bf16.
    bool is_bf16 = false;
    size_t num_tokens = 0;
    const void* expert_ids = nullptr;  // [num_tokens, top_k] in [-1, num_experts), int32 or int64.
    bool has_int64_ids = false;
    size_t top_k = 0;
    const float* weights = nullptr;  // [num_tokens, top_k]
    float* out = nullptr;            // [num_tokens, hidden_size], overwritten.
    // For training, arrays [pairs, 2, inner_columns()] of gate and up for each (token, expert)
    // pair, sorted by expert, then token, then slot; null: none. `delta` is added to gate and up,
    // and is zero in columns beyond the intermediate size. `kept` receives gate and up as the
    // activation saw them, in bf16, or in fp32 if the experts are in fp32.
    const float* delta = nullptr;
    void* kept = nullptr;
    // [num_experts] addresses of packed weights, for a bank that is apart; null for experts that
    // are not in memory.
    const uint8_t* const* addresses = nullptr;
    // Range of experts [first_expert, end_expert) that this call computes; choices of other experts
    // add nothing.
    size_t first_expert = 0;
    size_t end_expert = SIZE_MAX;
    bool is_added = false;  // To what `out` holds.
  };

  // The arguments and results of backward(); all are borrowed for the call.
  struct GradBatch {
    const void* x = nullptr;  // [num_tokens, hidden_size], as forward() had it; null with `kept`.
    bool is_bf16 = false;
    size_t num_tokens = 0;
    const void* expert_ids = nullptr;  // As of Batch.
    bool has_int64_ids = false;
    size_t top_k = 0;
    const float* weights = nullptr;  // [num_tokens, top_k]
    const void* d_out = nullptr;     // [num_tokens, hidden_size], fp32 or bf16.
    bool is_d_out_bf16 = false;
    const float* delta = nullptr;    // As forward() had it; unused with `kept`.
    const void* kept = nullptr;      // As forward() left it; null: computed again.
    // [pairs, inner_columns()], added to the gradient of h (already multiplied with router
    // weights); null: none.
    const float* extra = nullptr;
    void* d_gate_up = nullptr;       // [pairs, 2, inner_columns()], as kept; overwritten, or null.
    float* d_x = nullptr;            // [num_tokens, hidden_size], overwritten.
    float* d_weights = nullptr;      // [num_tokens, top_k], overwritten.
  };

  // Makes a bank. Errors: kUnsupported (format, ISA not available, storage for several parts,
  // several parts or storage of a bank that is apart), kShape (sizes that are not whole groups),
  // kConfig (ISA name, no experts, more parts than column blocks, an unknown activation, nodes for
  // another number of parts), kCapacity (memory), kNotFound (no such node).
  static Result<ExpertBank> create(const Config& config);
  // Returns the bytes of storage that create() needs for a configuration. Errors: as create.
  static Result<size_t> count_bytes(const Config& config);

  // Quantizes the weights of one expert, or lays out its codes if they are quantized. Errors:
  // kShape, kNotFound (expert), kUnsupported (weights that the format cannot hold), kConflict
  // (read-only storage), those of ThreadPool.
  Status pack(ThreadPool& pool, size_t expert_id, const MatrixView& gate, const MatrixView& up,
              const MatrixView& down);
  // Copies the packed weights of a bank with one part into the parts of this bank. Errors: kShape
  // (size), kConflict (read-only storage), those of ThreadPool.
  Status load(ThreadPool& pool, const uint8_t* packed, size_t size_bytes);
  // Sets the biases of one expert, which are zero before. Errors: kNotFound (expert), kConflict
  // (the bank was made without biases).
  Status set_bias(size_t expert_id, const float* gate, const float* up, const float* down);

  // Computes the experts' outputs for a batch. Errors: kShape (an expert id), kConflict (an expert
  // without weights, or an addition to `out` with several parts), both without touching `out`;
  // those of ThreadPool.
  Status forward(ThreadPool& pool, const Batch& batch) const;

  // Computes the gradients of forward() with respect to x and to the router weights; quantization
  // of activations counts as rounding, with derivative 1. Weights, `d_out`, and the gradients of
  // gate and up are rounded to bf16 unless the experts are in fp32; sums are in fp32. Errors: as
  // forward.
  Status backward(ThreadPool& pool, const GradBatch& batch) const;

  // Bounds of a call's speed, for benchmarks: read_weights reads the packed bytes of the first
  // `num_experts` experts, multiply_registers does as many multiply-adds with the format's dot
  // product. REQUIRES: num_experts <= num_experts().
  Status read_weights(ThreadPool& pool, size_t num_experts) const;
  Status multiply_registers(ThreadPool& pool, size_t num_macs) const;

  const WeightFormat& format() const { return format_; }
  const WeightFormat& down_format() const { return down_format_; }
  Isa isa() const { return isa_; }
  size_t num_experts() const { return num_experts_; }
  size_t hidden_size() const { return hidden_size_; }
  size_t intermediate_size() const { return intermediate_size_; }
  size_t num_parts() const { return parts_.size(); }
  // Number of columns of gate (or up), rounded up to whole blocks.
  size_t inner_columns() const { return whole_.num_gate_panels * kPanelColumns; }
  // True if the kernel placed the memory of every part on its wished NUMA node.
  bool is_bound() const;
  // Returns the NUMA node of each part's first page. Errors: kUnsupported (the kernel does not
  // report it).
  Result<std::vector<int>> find_part_nodes() const;
  // Packed bytes of one expert, scales included.
  size_t expert_bytes() const;
  // Packed weights of the first part, expert after expert; each expert has its gate and up panels
  // in turn, then its down panels.
  uint8_t* data() const { return parts_[0].data; }
  bool is_writable() const { return !is_apart_ && (!storage_ || storage_->is_writable); }
  bool is_apart() const { return is_apart_; }

 private:
  struct Routing;
  struct Scratch;
  struct GradShare;
  struct GradScratch;
  // A share of the intermediate dimension, stored like a layer of its own.
  struct Part {
    size_t first = 0;  // Of the intermediate size.
    size_t size = 0;
    size_t num_gate_panels = 0;   // Whole blocks.
    size_t down_panel_bytes = 0;
    size_t gate_up_bytes = 0;     // Of one expert.
    size_t expert_bytes = 0;
    uint8_t* data = nullptr;
    std::unique_ptr<AlignedBuffer> own;
  };
  struct PartTask {
    size_t part;
    size_t item;
  };

  ExpertBank() = default;
  // Makes a bank with all sizes, but without memory.
  static Result<ExpertBank> plan(const Config& config);
  Part plan_part(size_t first, size_t size) const;
  Result<Routing> route(const Batch& batch) const;
  const uint8_t* find_expert(const Part& part, const Scratch& scratch, size_t expert_id) const;
  // Runs the tasks of all parts, each on the sub-pool of its part; `count` returns the number of
  // tasks of a part.
  Status run_parts(ThreadPool& pool, FunctionRef<size_t(const Part&)> count,
                   FunctionRef<Status(const PartTask&)> run) const;
  Status run_gate_up(ThreadPool& pool, const Routing& routing, const Scratch& scratch) const;
  Status run_down(ThreadPool& pool, const Routing& routing, const Scratch& scratch,
                  const Batch& batch) const;
  Status run_inner_grads(ThreadPool& pool, const Routing& routing, const GradScratch& scratch,
                         const GradBatch& batch) const;
  void run_inner_task(const Routing& routing, const GradScratch& scratch, const GradBatch& batch,
                      const GradShare& share, size_t part_id, size_t panel) const;
  Status run_input_grads(ThreadPool& pool, const Routing& routing, const GradScratch& scratch,
                         const GradBatch& batch) const;
  void run_input_task(const Routing& routing, const GradScratch& scratch, size_t part_id,
                      size_t first_k, float* sums, size_t num_tokens) const;
  void sum_weight_grads(const Routing& routing, const GradScratch& scratch,
                        const GradBatch& batch) const;
  Status merge_parts(ThreadPool& pool, const std::vector<const float*>& sums, size_t num_tokens,
                     float* out) const;
  Status pack_part(const Part& part, size_t expert_id, size_t panel, const MatrixView& gate,
                   const MatrixView& up, const MatrixView& down) const;
  void copy_part(const Part& part, size_t expert_id, const uint8_t* packed) const;
  size_t block_panels() const;
  // Number of gate (or up) panels of which every part has a multiple.
  size_t part_panels() const;
  size_t block_size() const { return block_panels() * kPanelColumns; }

  WeightFormat format_{};       // Format of gate and up.
  WeightFormat down_format_{};
  Activation activation_;
  Isa isa_ = Isa::kPlain;
  const PackedKernels* kernels_ = nullptr;
  size_t num_experts_ = 0;
  size_t hidden_size_ = 0;
  size_t intermediate_size_ = 0;
  size_t hidden_panel_bytes_ = 0;  // A panel over the hidden size: of gate or up.
  size_t num_down_panels_ = 0;
  Part whole_;                     // Sizes of the one part that a layer is unless it is split.
  std::vector<Part> parts_;
  bool is_apart_ = false;
  std::shared_ptr<const Storage> storage_;
  // Biases by expert, each filled up to whole panels; empty if the bank has none.
  std::vector<float> gate_bias_;
  std::vector<float> up_bias_;
  std::vector<float> down_bias_;
};

}  // namespace tandem
