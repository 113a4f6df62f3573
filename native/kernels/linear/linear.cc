#include "kernels/linear/linear.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/linear/operand.h"
#include "kernels/weights/turned_panel.h"

namespace tandem {
namespace {

// Smallest size of a matrix in bytes for which huge pages are used: in a smaller one most of the
// last huge page would be waste.
constexpr size_t kMinHugeBytes = size_t{16} << 20;
// Number of outputs that share a scale in e4m3; rows are packed in whole blocks of them.
constexpr size_t kBlockRows = 128;
// Number of rows that one task of take_rows writes.
constexpr size_t kTakenRows = 4;

}  // namespace

Result<PackedMatrix> PackedMatrix::plan(const Config& config) {
  Status status = check_format(config.format);
  if (status.is_ok()) status = check_size(config.format, config.in_features, "in_features");
  if (!status.is_ok()) return status.error();
  if (config.out_features == 0)
    return Error{Code::kConfig, "kernels.create_linear", "0 outputs: give at least 1",
                 "out_features"};
  Result<Isa> isa = choose_isa(config.isa);
  if (!isa.is_ok()) return isa.error();
  PackedMatrix matrix;
  matrix.format_ = config.format;
  matrix.isa_ = isa.value();
  matrix.kernels_ = &packed_kernels(matrix.isa_);
  matrix.in_features_ = config.in_features;
  matrix.out_features_ = config.out_features;
  matrix.panel_bytes_ = panel_bytes(config.format, config.in_features);
  return matrix;
}

Result<size_t> PackedMatrix::count_bytes(const Config& config) {
  Result<PackedMatrix> matrix = plan(config);
  if (!matrix.is_ok()) return matrix.error();
  return matrix.value().size_bytes();
}

Result<PackedMatrix> PackedMatrix::create(const Config& config) {
  Result<PackedMatrix> planned = plan(config);
  if (!planned.is_ok()) return planned;
  PackedMatrix& matrix = planned.value();
  if (config.storage) {
    Status status = check_storage(*config.storage, matrix.size_bytes(), "kernels.create_linear");
    if (!status.is_ok()) return status.error();
    matrix.storage_ = config.storage;
    matrix.data_ = config.storage->data;
    if (config.share_nodes.empty()) return planned;
    return Error{Code::kConfig, "kernels.create_linear",
                 "nodes for storage, which lies where it lies: give one of both", "share_nodes"};
  }
  AlignedBuffer::Options options;
  options.hugepages = matrix.size_bytes() >= kMinHugeBytes;
  matrix.num_shares_ = std::max<size_t>(1, config.share_nodes.size());
  for (size_t share = 0; share < config.share_nodes.size(); ++share)
    options.node_shares.push_back(
        {matrix.first_panel(share + 1) * matrix.panel_bytes_, config.share_nodes[share]});
  Result<AlignedBuffer> buffer = AlignedBuffer::allocate(matrix.size_bytes(), options);
  if (!buffer.is_ok()) return buffer.error();
  matrix.own_ = std::make_unique<AlignedBuffer>(std::move(buffer.value()));
  matrix.data_ = matrix.own_->data();
  return planned;
}

size_t PackedMatrix::first_panel(size_t share) const {
  return count_panels(out_features_) * share / num_shares_;
}

Result<std::vector<int>> PackedMatrix::find_share_nodes() const {
  std::vector<int> nodes;
  for (size_t share = 0; share < num_shares_; ++share) {
    // Look at the middle of a share, since its first panel may begin on a page that belongs to the
    // share before.
    const size_t middle = (first_panel(share) + first_panel(share + 1)) * panel_bytes_ / 2;
    Result<int> node = find_page_node(data_ + middle);
    if (!node.is_ok()) return node.error();
    nodes.push_back(node.value());
  }
  return nodes;
}

Status PackedMatrix::pack(ThreadPool& pool, size_t first_row, const MatrixView& source) {
  constexpr const char* kWhere = "kernels.pack";
  if (!is_writable()) return {Code::kConflict, kWhere, "these weights are mapped read-only", "storage"};
  const bool is_inside = first_row <= out_features_ && source.rows <= out_features_ - first_row;
  const bool is_last = is_inside && first_row + source.rows == out_features_;
  if (source.columns != in_features_ || !is_inside || first_row % kBlockRows != 0 ||
      (source.rows % kBlockRows != 0 && !is_last))
    return {Code::kShape, kWhere,
            "weights [" + std::to_string(source.rows) + ", " + std::to_string(source.columns) +
                "] at row " + std::to_string(first_row) + " of [" + std::to_string(out_features_) +
                ", " + std::to_string(in_features_) + "]: give whole blocks of " +
                std::to_string(kBlockRows) + " rows, or all up to the last",
            "weights"};
  uint8_t* panels = data_ + first_row / kPanelColumns * panel_bytes_;
  return pack_panels(pool, count_panels(source.rows), [&](size_t i) {
    return pack_panel(*kernels_, format_, {&source, i * kPanelColumns, 0, in_features_},
                      panels + i * panel_bytes_);
  });
}

void PackedMatrix::set_bias(const float* bias) {
  bias_.assign(count_panels(out_features_) * kPanelColumns, 0.0f);
  std::copy_n(bias, out_features_, bias_.begin());
}

Status PackedMatrix::forward(ThreadPool& pool, const Batch& batch) const {
  if (batch.num_rows == 0) return {};
  thread_local Arena arena;
  const size_t row_size = padded_size(format_, in_features_);
  Status status = arena.reserve(operand_bytes(format_, batch.num_rows, row_size) + kPackedAlignment);
  if (!status.is_ok()) return status;
  const Operand x = take_operand(arena, format_, batch.num_rows, row_size);
  status = prepare_rows(pool, *kernels_,
                        {format_, batch.x, batch.is_bf16, in_features_, 0, batch.num_rows, x});
  if (!status.is_ok()) return status;
  const size_t num_pieces = (batch.num_rows + kMaxTaskRows - 1) / kMaxTaskRows;
  const size_t out_bytes = batch.is_out_bf16 ? 2 : 4;
  const size_t out_stride = batch.out_stride == 0 ? out_features_ : batch.out_stride;
  const auto run = [&](size_t piece, size_t panel) {
    const size_t first = batch.num_rows * piece / num_pieces;
    const size_t last = batch.num_rows * (piece + 1) / num_pieces;
    const size_t column = panel * kPanelColumns;
    kernels_->linear({
        .format = format_,
        .size = row_size,
        .x = x,
        .first_row = first,
        .num_rows = last - first,
        .panel = data_ + panel * panel_bytes_,
        .bias = bias_.empty() ? nullptr : bias_.data() + column,
        .out = static_cast<uint8_t*>(batch.out) + column * out_bytes,
        .is_bf16 = batch.is_out_bf16,
        .is_added = batch.is_added,
        .out_stride = out_stride,
        .num_columns = std::min(kPanelColumns, out_features_ - column)});
  };
  // With few rows a task takes neighbouring panels together, which are one stream from memory.
  const size_t chunk = pieces_per_task(pool, count_panels(out_features_) * num_pieces);
  const size_t num_nodes = static_cast<size_t>(pool.num_nodes());
  if (num_shares_ == 1 || num_nodes == 1) {
    const size_t num_panels = count_panels(out_features_);
    return pool.parallel_for(num_panels * num_pieces, chunk, [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) run(i / num_panels, i % num_panels);
    });
  }
  // Returns the first panel of a node; the shares of a node, and so its panels, are consecutive.
  const auto first_of = [&](size_t node) {
    return first_panel((node * num_shares_ + num_nodes - 1) / num_nodes);
  };
  size_t most = 0;
  for (size_t n = 0; n < num_nodes; ++n)
    most = std::max(most, (first_of(n + 1) - first_of(n)) * num_pieces);
  return pool.parallel_for_nodes(most, chunk, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      const size_t node = i / most, item = i % most;
      const size_t num_panels = first_of(node + 1) - first_of(node);
      if (item < num_panels * num_pieces)
        run(item / num_panels, first_of(node) + item % num_panels);
    }
  });
}

Status PackedMatrix::backward(ThreadPool& pool, const GradBatch& batch) const {
  if (batch.num_rows == 0) return {};
  const size_t num_panels = count_panels(out_features_);
  const size_t num_blocks = count_panels(in_features_);
  const size_t size = padded_size(format_, in_features_);
  thread_local Arena arena;
  const size_t row_size = num_panels * kPanelColumns;
  const WeightFormat rounding = gradient_format(format_);
  Status status = arena.reserve(operand_bytes(rounding, batch.num_rows, row_size) +
                                kPackedAlignment);
  if (!status.is_ok()) return status;
  const Operand d_out = take_operand(arena, rounding, batch.num_rows, row_size);
  status = prepare_rows(pool, *kernels_, {rounding, batch.d_out, batch.is_bf16, out_features_, 0,
                                          batch.num_rows, d_out});
  if (!status.is_ok()) return status;
  return pool.parallel_for(num_blocks, 1, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      const size_t first = i * kPanelColumns;
      multiply_turned(*kernels_,
                      {
                          .format = format_,
                          .panels = data_,
                          .panel_stride = panel_bytes_,
                          .num_panels = num_panels,
                          .first_k = first,
                          .num_k = std::min(kPanelColumns, size - first),
                          .d_y = d_out,
                          .row_ids = nullptr,
                          .num_rows = batch.num_rows,
                          .out = batch.d_x + first,
                          .out_stride = in_features_,
                          .num_columns = std::min(kPanelColumns, in_features_ - first),
                          .is_added = batch.is_added});
    }
  });
}

Status PackedMatrix::forward_heads(ThreadPool& pool, const HeadsBatch& batch) const {
  if (batch.num_rows == 0) return {};
  thread_local Arena arena;
  const size_t row_size = padded_size(format_, in_features_);
  const size_t num_rows = batch.num_rows * batch.num_heads;
  Status status = arena.reserve(operand_bytes(format_, num_rows, row_size) + kPackedAlignment);
  if (!status.is_ok()) return status;
  const Operand x = take_operand(arena, format_, num_rows, row_size);
  status = prepare_rows(pool, *kernels_,
                        {
                            .format = format_,
                            .x = batch.x,
                            .is_bf16 = batch.is_bf16,
                            .size = in_features_,
                            .first_row = 0,
                            .last_row = num_rows,
                            .out = x,
                            .head_rows = batch.num_rows,
                            .head_stride = batch.x_head_stride,
                            .token_stride = batch.x_stride});
  if (!status.is_ok()) return status;
  const size_t num_pieces = (batch.num_rows + kMaxTaskRows - 1) / kMaxTaskRows;
  const size_t num_panels = count_panels(out_features_) / batch.num_heads;
  const size_t out_bytes = batch.is_out_bf16 ? 2 : 4;
  const auto run = [&](size_t head, size_t piece, size_t panel) {
    // Use only this head's rows of the operand.
    const size_t skipped = head * batch.num_rows;
    Operand own = x;
    own.data += skipped * x.row_bytes;
    if (own.scales != nullptr) own.scales += skipped * x.num_groups;
    if (own.corrections != nullptr) own.corrections += skipped * x.num_groups;
    if (own.offsets != nullptr) own.offsets += skipped * x.num_groups;
    const size_t first = batch.num_rows * piece / num_pieces;
    const size_t last = batch.num_rows * (piece + 1) / num_pieces;
    const size_t column = panel * kPanelColumns;
    kernels_->linear({
        .format = format_,
        .size = row_size,
        .x = own,
        .first_row = first,
        .num_rows = last - first,
        .panel = data_ + (head * num_panels + panel) * panel_bytes_,
        .bias = nullptr,
        .out = static_cast<uint8_t*>(batch.out) + (head * batch.out_head_stride + column) * out_bytes,
        .is_bf16 = batch.is_out_bf16,
        .is_added = false,
        .out_stride = batch.out_stride,
        .num_columns = std::min(kPanelColumns, batch.head_columns - column)});
  };
  const size_t num_items = batch.num_heads * num_pieces * num_panels;
  return pool.parallel_for(num_items, pieces_per_task(pool, num_items),
                           [&](size_t begin, size_t end, int) {
                             for (size_t i = begin; i < end; ++i)
                               run(i / (num_pieces * num_panels), i / num_panels % num_pieces,
                                   i % num_panels);
                           });
}

Status PackedMatrix::unpack(ThreadPool& pool, float* out) const {
  constexpr size_t kInputs = 32;
  return pool.parallel_for(count_panels(out_features_), 1, [&](size_t begin, size_t end, int) {
    float values[kInputs * kPanelColumns];
    for (size_t panel = begin; panel < end; ++panel) {
      const size_t row = panel * kPanelColumns;
      const size_t num_rows = std::min(kPanelColumns, out_features_ - row);
      const size_t size = padded_size(format_, in_features_);
      for (size_t k = 0; k < in_features_; k += kInputs) {
        kernels_->widen({format_, data_ + panel * panel_bytes_, k, std::min(kInputs, size - k), values});
        const size_t count = std::min(kInputs, in_features_ - k);
        for (size_t r = 0; r < num_rows; ++r)
          for (size_t i = 0; i < count; ++i)
            out[(row + r) * in_features_ + k + i] = values[i * kPanelColumns + r];
      }
    }
  });
}

Status PackedMatrix::take_rows(ThreadPool& pool, const int64_t* outputs, size_t num_rows, void* out,
                               bool is_bf16) const {
  for (size_t i = 0; i < num_rows; ++i)
    if (outputs[i] < 0 || static_cast<uint64_t>(outputs[i]) >= out_features_)
      return {Code::kShape, "kernels.take_rows",
              "row " + std::to_string(outputs[i]) + " of " + std::to_string(out_features_),
              "outputs"};
  const size_t size = padded_size(format_, in_features_);
  return pool.parallel_for(num_rows, kTakenRows, [&](size_t begin, size_t end, int) {
    alignas(64) float values[kMaxGroupSize * kRowColumns];
    for (size_t i = begin; i < end; ++i) {
      const auto row = static_cast<size_t>(outputs[i]);
      const size_t column = row % kPanelColumns, in_vector = column % kRowColumns;
      const uint8_t* panel = data_ + row / kPanelColumns * panel_bytes_;
      for (size_t k = 0; k < in_features_; k += kMaxGroupSize) {
        kernels_->widen({format_, panel, k, std::min<size_t>(kMaxGroupSize, size - k), values, true,
                         column - in_vector});
        const size_t count = std::min<size_t>(kMaxGroupSize, in_features_ - k);
        const size_t at = i * in_features_ + k;
        for (size_t j = 0; j < count; ++j) {
          const float value = values[j * kRowColumns + in_vector];
          if (is_bf16) static_cast<uint16_t*>(out)[at + j] = narrow_to_bf16(value);
          else static_cast<float*>(out)[at + j] = value;
        }
      }
    }
  });
}

Status PackedMatrix::read_weights(ThreadPool& pool) const {
  return read_packed(pool, *kernels_, data_, size_bytes());
}

Status PackedMatrix::multiply_registers(ThreadPool& pool, size_t num_macs) const {
  return multiply_packed(pool, *kernels_, format_, num_macs);
}

}  // namespace tandem
