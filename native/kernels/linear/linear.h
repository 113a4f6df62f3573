// One matrix with packed weights, on the CPU: y = x W^T + b.
//
// Owns the packed weights, or views those that lie in somebody's storage. forward() codes the input
// and runs one parallel loop over (64 outputs, some hundred rows). A row's output does not depend on
// what else is in the batch, nor on the threads, nor on the NUMA nodes over which outputs are spread.
//
// Threads: forward() may be called by several threads at once, but not while pack() or set_bias()
// runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

class PackedMatrix {
 public:
  struct Config {
    WeightFormat format;
    size_t in_features = 0;
    size_t out_features = 0;
    std::string_view isa;  // Empty: the widest here.
    // Memory with packed weights that somebody else owns, such as a mapped file; none: the matrix
    // has its own memory, zeroed.
    std::shared_ptr<const WeightStorage> storage;
    // NUMA nodes on which equal shares of the outputs should lie; the sub-pools of these nodes
    // compute them: share i belongs to sub-pool i * num_nodes / num_shares of a pool. Empty: memory
    // lies where it is touched first, and any thread computes any output. Not together with
    // `storage`.
    std::vector<int> share_nodes;
  };

  // The arguments of forward(); all are borrowed for the call.
  struct Batch {
    const void* x = nullptr;  // [num_rows, in_features], fp32 or bf16.
    bool is_bf16 = false;
    size_t num_rows = 0;
    void* out = nullptr;  // [num_rows, out_features], fp32 or bf16.
    bool is_out_bf16 = false;
    bool is_added = false;  // To what `out` holds; otherwise it is overwritten.
    size_t out_stride = 0;  // Items of a row of `out`; 0: out_features.
  };

  // The arguments and results of backward(); all are borrowed for the call.
  struct GradBatch {
    const void* d_out = nullptr;  // [num_rows, out_features], fp32 or bf16.
    bool is_bf16 = false;
    size_t num_rows = 0;
    float* d_x = nullptr;  // [num_rows, in_features]
    bool is_added = false;
  };

  // The arguments of forward_heads(), for one matrix per head: head h of every row is multiplied
  // with the h-th of `num_heads` equal shares of the outputs. A share has whole panels, of which
  // the first `head_columns` outputs are wanted. Strides count items.
  struct HeadsBatch {
    const void* x = nullptr;  // [num_rows][num_heads][in_features], fp32 or bf16.
    bool is_bf16 = false;
    size_t num_rows = 0;
    size_t num_heads = 1;
    size_t x_stride = 0;
    size_t x_head_stride = 0;
    void* out = nullptr;  // [num_rows][num_heads][head_columns], fp32 or bf16.
    bool is_out_bf16 = false;
    size_t head_columns = 0;
    size_t out_stride = 0;
    size_t out_head_stride = 0;
  };

  // Makes a matrix. Errors: kUnsupported (format, ISA not available), kShape (in_features that are
  // not whole groups), kConfig (ISA name, a size of 0, nodes together with storage), kCapacity
  // (memory), kNotFound (node).
  static Result<PackedMatrix> create(const Config& config);
  // Returns the bytes of storage that create() needs for a configuration. Errors: as create.
  static Result<size_t> count_bytes(const Config& config);

  // Quantizes rows [first_row, first_row + matrix.rows) of W, or lays out their codes if they are
  // quantized. Errors: kShape (columns; a first row that does not start a block of 128; rows that
  // end inside a block and are not the last ones), kUnsupported (weights that the format cannot
  // hold), kConflict (read-only storage), those of ThreadPool.
  Status pack(ThreadPool& pool, size_t first_row, const MatrixView& matrix);
  // Sets the bias. REQUIRES: `bias` has out_features values.
  void set_bias(const float* bias);

  // Computes y = x W^T + b for a batch. Errors: those of ThreadPool.
  Status forward(ThreadPool& pool, const Batch& batch) const;
  // Computes d_x = d_out W, with W dequantized: the gradient with respect to x. Unless W is in
  // fp32, d_out and W are rounded to bf16; sums are in fp32. Errors: kCapacity, those of
  // ThreadPool.
  Status backward(ThreadPool& pool, const GradBatch& batch) const;
  // Multiplies each head of the rows with its own matrix, see HeadsBatch. REQUIRES: shares as
  // HeadsBatch says; no bias. Errors: those of ThreadPool.
  Status forward_heads(ThreadPool& pool, const HeadsBatch& batch) const;

  // Writes the dequantized weights, [out_features, in_features] in fp32, without the bias. Errors:
  // those of ThreadPool.
  Status unpack(ThreadPool& pool, float* out) const;

  // Writes the dequantized weights of some outputs, [num_rows, in_features], in fp32 or, rounded
  // once, in bf16. Errors: kShape (no such output), those of ThreadPool.
  Status take_rows(ThreadPool& pool, const int64_t* outputs, size_t num_rows, void* out,
                   bool is_bf16) const;

  // Bounds of a call's speed, for benchmarks: read_weights reads all packed bytes,
  // multiply_registers does multiply-adds with the format's dot product.
  Status read_weights(ThreadPool& pool) const;
  Status multiply_registers(ThreadPool& pool, size_t num_macs) const;

  Isa isa() const { return isa_; }
  size_t in_features() const { return in_features_; }
  size_t out_features() const { return out_features_; }
  const WeightFormat& format() const { return format_; }
  size_t size_bytes() const { return count_panels(out_features_) * panel_bytes_; }
  uint8_t* data() const { return data_; }
  bool is_writable() const { return !storage_ || storage_->is_writable; }
  // True if the kernel placed every share on its wished NUMA node.
  bool is_bound() const { return own_ && own_->has_node(); }
  // Returns the NUMA node of each share's first page, once weights are packed. Errors: kUnsupported
  // (the kernel does not report it).
  Result<std::vector<int>> find_share_nodes() const;

 private:
  PackedMatrix() = default;
  // Returns the index of a share's first panel; for a share number after the last, the number of
  // panels.
  size_t first_panel(size_t share) const;
  static Result<PackedMatrix> plan(const Config& config);

  WeightFormat format_{};
  Isa isa_ = Isa::kPlain;
  const PackedKernels* kernels_ = nullptr;
  size_t in_features_ = 0;
  size_t out_features_ = 0;
  size_t panel_bytes_ = 0;
  size_t num_shares_ = 1;
  std::vector<float> bias_;  // Empty, or of whole panels.
  uint8_t* data_ = nullptr;  // Of one of these two.
  std::unique_ptr<AlignedBuffer> own_;
  std::shared_ptr<const WeightStorage> storage_;
};

}  // namespace tandem
