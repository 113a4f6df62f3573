#include "kernels/linear/lora.h"

#include <algorithm>

namespace tandem {
namespace {

// Sizes of one piece of work, in rows, ranks and panels: its weights are a few kilobytes, read once
// for all its rows.
constexpr size_t kPieceRows = 16;
constexpr size_t kPieceRanks = 8;
constexpr size_t kPiecePanels = 8;
// Least number of products for which another thread is worth waking.
constexpr size_t kMinSharedProducts = 64 * 1024;

size_t item_bytes(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

const void* offset(const void* data, size_t items, FloatType type) {
  return static_cast<const uint8_t*>(data) + items * item_bytes(type);
}

template <class Piece>
Status run_pieces(ThreadPool* pool, void (*kernel)(const Piece&), const std::vector<Piece>& pieces,
                  size_t num_products) {
  if (pool == nullptr || num_products < kMinSharedProducts) {
    for (const Piece& piece : pieces) kernel(piece);
    return {};
  }
  const size_t chunk = pieces.size() / (8 * static_cast<size_t>(pool->num_threads())) + 1;
  return pool->parallel_for(pieces.size(), chunk, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) kernel(pieces[i]);
  });
}

void plan_part(const LoraTask& task, const LoraGroup& group, const LoraPart& part, float* low,
               LoraScratch& scratch) {
  const void* x = offset(task.x, part.head * task.x_head_stride, task.type);
  float* sums = task.sums + part.head * task.sums_head_stride + part.first_output;
  const size_t num_panels = (part.out_size + kLoraColumns - 1) / kLoraColumns;
  for (size_t row = 0; row < group.num_rows; row += kPieceRows) {
    const size_t num_rows = std::min(kPieceRows, group.num_rows - row);
    float* own = low + row * part.rank;
    for (size_t rank = 0; rank < part.rank; rank += kPieceRanks)
      scratch.downs.push_back({
          .x = x,
          .x_stride = task.x_stride,
          .rows = group.rows + row,
          .num_rows = num_rows,
          .down = offset(part.down, rank * part.in_size, task.type),
          .in_size = part.in_size,
          .num_ranks = std::min(kPieceRanks, part.rank - rank),
          .scale = part.scale,
          .low = own + rank,
          .low_stride = part.rank,
          .type = task.type});
    for (size_t panel = 0; panel < num_panels; panel += kPiecePanels) {
      const size_t first = panel * kLoraColumns;
      scratch.ups.push_back({
          .low = own,
          .rank = part.rank,
          .rows = group.rows + row,
          .num_rows = num_rows,
          .up = offset(part.up, first * part.rank, task.type),
          .sums = sums + first,
          .sums_stride = task.sums_stride,
          .num_columns = std::min(kPiecePanels * kLoraColumns, part.out_size - first),
          .type = task.type});
    }
  }
}

}  // namespace

Status run_lora(const RowKernels& kernels, ThreadPool* pool, const LoraTask& task,
                const std::vector<LoraGroup>& groups, LoraScratch& scratch) {
  size_t low_size = 0, down_products = 0, up_products = 0;
  for (const LoraGroup& group : groups)
    for (size_t i = 0; i < group.num_parts; ++i) {
      const LoraPart& part = group.parts[i];
      low_size += group.num_rows * part.rank;
      down_products += group.num_rows * part.rank * part.in_size;
      up_products += group.num_rows * part.rank * part.out_size;
    }
  if (scratch.low.size() < low_size) scratch.low.resize(low_size);
  scratch.downs.clear();
  scratch.ups.clear();
  float* low = scratch.low.data();
  for (const LoraGroup& group : groups)
    for (size_t i = 0; i < group.num_parts; ++i) {
      plan_part(task, group, group.parts[i], low, scratch);
      low += group.num_rows * group.parts[i].rank;
    }
  Status status = run_pieces(pool, kernels.lora_down, scratch.downs, down_products);
  if (!status.is_ok()) return status;
  status = run_pieces(pool, kernels.lora_up, scratch.ups, up_products);
  if (!status.is_ok() || task.out == nullptr) return status;
  return run_round(kernels, pool,
                   {
                       .sums = task.sums,
                       .sums_stride = task.sums_stride,
                       .sums_head_stride = task.sums_head_stride,
                       .out = task.out,
                       .out_stride = task.out_stride,
                       .out_head_stride = task.out_head_stride,
                       .out_type = task.out_type,
                       .is_added = task.is_added,
                       .num_rows = task.num_rows,
                       .num_heads = task.num_heads,
                       .size = task.out_size});
}

}  // namespace tandem
