#include "kernels/attention/attention.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "kernels/built_isas.h"
#include "kernels/weights/packing.h"

namespace tandem {

extern const AttentionKernels kAttentionPlain;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512Bw;
extern const AttentionKernels kAttentionAvx512Bf16;
#endif

namespace {

// Least work for which attention uses several threads, in multiply-adds and in bytes read: about
// what one thread does in the microseconds that starting a job costs.
constexpr size_t kMinSharedMacs = 4 << 20;
constexpr size_t kMinSharedBytes = 512 << 10;
// Least number of tasks per thread, so that no thread waits long for the last task.
constexpr size_t kTasksPerThread = 4;

// Rows of one sequence and KV head that are attended together. One task computes all splits of the
// keys, or several tasks compute one split each and leave partial results.
struct Tile {
  size_t sequence, kv_head, first_row, num_rows;
  size_t key_begin, key_end;  // Multiples of kTileTokens.
  const int32_t* chosen;      // Positions of the keys; null is all.
  size_t first_part, num_parts;  // Partial results, from this float on; none where one task does all.
};
struct Task {
  size_t tile;
  size_t split;  // Among the tile's; ignored where one task does them all.
  size_t cost;
};

// Scratch memory of a thread for one tile of rows; it grows and never shrinks.
class Scratch {
 public:
  TileScratch tile;
  void* queries = nullptr;
  RowState total{}, part{};

  void reserve(size_t key_dim, size_t value_dim) {
    const size_t columns = round_up(value_dim, kColumnStep);
    const size_t k = round_up(key_dim, kColumnStep);
    const size_t sizes[] = {
        kTileRows * kTileTokens * 4,  (kTileRows * kTileTokens + 16) * 4,
        (kTileRows + 16) * 4,         k * kTileTokens * 4,
        columns * kTileTokens * 4,    (kTileRows * k + 64) * 4,
        kTileRows * 4,                kTileRows * 4,
        kTileRows * columns * 4,      kTileRows * 4,
        kTileRows * 4,                kTileRows * columns * 4};
    size_t total_bytes = 64;
    for (const size_t size : sizes) total_bytes += round_up(size, 64);
    if (total_bytes > capacity_) {
      memory_.reset(new uint8_t[total_bytes]);
      capacity_ = total_bytes;
    }
    uintptr_t next = round_up(reinterpret_cast<uintptr_t>(memory_.get()), 64);
    void* parts[std::size(sizes)];
    for (size_t i = 0; i < std::size(sizes); next += round_up(sizes[i], 64), ++i)
      parts[i] = reinterpret_cast<void*>(next);
    const auto floats = [&](size_t i) { return static_cast<float*>(parts[i]); };
    tile = {floats(0), parts[1], floats(2), parts[3], parts[4]};
    queries = parts[5];
    total = {floats(6), floats(7), floats(8)};
    part = {floats(9), floats(10), floats(11)};
  }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t capacity_ = 0;
};

class Run {
 public:
  Run(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
      const AttentionCall& call)
      : kernels_(kernels), pool_(pool), step_(step), call_(call) {
    group_ = call.num_heads / step.kv.num_kv_heads;
    columns_ = round_up(step.kv.value_dim, kColumnStep);
    is_bf16_ = call.type == FloatType::kBfloat16 && step.kv.type != KvType::kFloat32;
  }

  Status perform() {
    plan_tiles();
    plan_tasks();
    if (pool_ == nullptr) {
      for (const Task& task : tasks_) perform_task(task);
      merge_parts(0, tiles_.size());
      return {};
    }
    const Status status = pool_->parallel_for(tasks_.size(), 1, [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) perform_task(tasks_[i]);
    });
    if (!status.is_ok() || parts_ == nullptr) return status;
    return pool_->parallel_for(tiles_.size(), 1, [&](size_t begin, size_t end, int) {
      merge_parts(begin, end);
    });
  }

 private:
  size_t num_tokens_of(size_t sequence) const {
    return static_cast<size_t>(step_.query_start[sequence + 1] - step_.query_start[sequence]);
  }
  int64_t first_position(size_t sequence) const {
    return step_.context_lens[sequence] -
           (step_.query_start[sequence + 1] - step_.query_start[sequence]);
  }

  void plan_tiles() {
    for (size_t sequence = 0; sequence < step_.num_sequences(); ++sequence) {
      const int64_t first = first_position(sequence);
      const size_t num_whole = count_whole(sequence);
      const size_t num_rows = num_whole * group_;
      plan_chosen(sequence, num_whole);
      for (size_t row = 0; row < num_rows; row += kTileRows) {
        const size_t count = std::min(kTileRows, num_rows - row);
        const int64_t last_position = first + static_cast<int64_t>((row + count - 1) / group_);
        const int64_t seen = call_.rule.first_seen(first + static_cast<int64_t>(row / group_));
        const size_t begin = static_cast<size_t>(seen) / kTileTokens * kTileTokens;
        const size_t end = round_up(static_cast<size_t>(last_position) + 1, kTileTokens);
        for (size_t head = 0; head < step_.kv.num_kv_heads; ++head)
          tiles_.push_back({
              .sequence = sequence,
              .kv_head = head,
              .first_row = row,
              .num_rows = count,
              .key_begin = begin,
              .key_end = end,
              .chosen = nullptr,
              .first_part = 0,
              .num_parts = 0});
      }
    }
  }

  // Returns how many of a sequence's first tokens in this step attend to all keys up to their own
  // position.
  size_t count_whole(size_t sequence) const {
    const size_t tokens = num_tokens_of(sequence);
    if (call_.chosen == nullptr) return tokens;
    const int64_t left = static_cast<int64_t>(call_.num_chosen) - first_position(sequence);
    return left <= 0 ? 0 : std::min(tokens, static_cast<size_t>(left));
  }

  // Plans the tokens with chosen keys: each has keys of its own, and therefore tiles of its own.
  void plan_chosen(size_t sequence, size_t first_token) {
    const size_t row_of_sequence = static_cast<size_t>(step_.query_start[sequence]);
    const size_t end = round_up(call_.num_chosen, kTileTokens);
    for (size_t token = first_token; token < num_tokens_of(sequence); ++token) {
      const int32_t* chosen = call_.chosen + (row_of_sequence + token) * call_.num_chosen;
      for (size_t row = 0; row < group_; row += kTileRows)
        for (size_t head = 0; head < step_.kv.num_kv_heads; ++head)
          tiles_.push_back({
              .sequence = sequence,
              .kv_head = head,
              .first_row = token * group_ + row,
              .num_rows = std::min(kTileRows, group_ - row),
              .key_begin = 0,
              .key_end = end,
              .chosen = chosen,
              .first_part = 0,
              .num_parts = 0});
    }
  }

  size_t cost_of(size_t num_rows, size_t num_keys) const {
    // Packing a key costs about as much as four rows.
    return (num_rows + 4) * num_keys * (step_.kv.key_dim + step_.kv.value_dim);
  }

  void plan_tasks() {
    size_t macs = 0, bytes = 0;
    for (const Tile& tile : tiles_) {
      const size_t num_keys = tile.key_end - tile.key_begin;
      macs += cost_of(tile.num_rows, num_keys);
      bytes += num_keys * step_.kv.row_bytes * 2;
    }
    if (pool_ != nullptr && macs < kMinSharedMacs && bytes < kMinSharedBytes) pool_ = nullptr;
    const size_t wanted =
        pool_ == nullptr ? 1 : kTasksPerThread * static_cast<size_t>(pool_->num_threads());
    const bool splits = tiles_.size() < wanted;
    size_t num_floats = 0;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      Tile& tile = tiles_[i];
      const size_t first = tile.key_begin / kSplitTokens;
      const size_t num_splits = (tile.key_end - 1) / kSplitTokens - first + 1;
      if (!splits || num_splits == 1) {
        tasks_.push_back({i, 0, cost_of(tile.num_rows, tile.key_end - tile.key_begin)});
        continue;
      }
      tile.first_part = num_floats;
      tile.num_parts = num_splits;
      num_floats += num_splits * part_size(tile);
      for (size_t split = 0; split < num_splits; ++split)
        tasks_.push_back({i, split, cost_of(tile.num_rows, kSplitTokens)});
    }
    // Sort the longest tasks first, since a task that starts last should be short.
    if (pool_ != nullptr)
      std::stable_sort(tasks_.begin(), tasks_.end(),
                       [](const Task& a, const Task& b) { return a.cost > b.cost; });
    if (num_floats > 0) parts_.reset(new float[num_floats]);
  }

  // Returns the number of floats of a tile's partial result.
  size_t part_size(const Tile& tile) const { return tile.num_rows * (columns_ + 2); }

  RowState part_of(const Tile& tile, size_t split) {
    float* memory = parts_.get() + tile.first_part + split * part_size(tile);
    return {memory, memory + tile.num_rows, memory + 2 * tile.num_rows};
  }

  void perform_task(const Task& task) {
    thread_local Scratch scratch;
    const KvView& kv = step_.kv;
    scratch.reserve(kv.key_dim, kv.value_dim);
    const Tile& tile = tiles_[task.tile];
    const size_t first_token = static_cast<size_t>(step_.query_start[tile.sequence]);
    const size_t item = float_bytes(call_.type);
    QueryRows rows;
    rows.q = static_cast<const uint8_t*>(call_.q) +
             (first_token * call_.q_stride + tile.kv_head * group_ * kv.key_dim) * item;
    rows.type = call_.type;
    rows.token_stride = call_.q_stride;
    rows.group = group_;
    rows.first_row = tile.first_row;
    rows.num_rows = tile.num_rows;
    rows.key_dim = kv.key_dim;
    kernels_.load_queries(rows, scratch.queries, is_bf16_);
    SplitTask split{};
    split.rows = {
        .kv = &kv,
        .blocks = step_.block_table + tile.sequence * step_.table_width,
        .layer_offset = call_.layer_offset,
        .kv_head = tile.kv_head,
        .positions = tile.chosen};
    split.rule = call_.rule;
    split.queries = scratch.queries;
    split.is_bf16 = is_bf16_;
    split.group = group_;
    split.first_row = tile.first_row;
    split.num_rows = tile.num_rows;
    split.first_position =
        tile.chosen == nullptr ? first_position(tile.sequence)
                               : static_cast<int64_t>(call_.num_chosen) - 1 -
                                     static_cast<int64_t>(tile.first_row / group_);
    split.scratch = scratch.tile;
    const size_t first_split = tile.key_begin / kSplitTokens;
    const auto run_split = [&](size_t index, const RowState& state) {
      split.key_begin = std::max(tile.key_begin, (first_split + index) * kSplitTokens);
      split.key_end = std::min(tile.key_end, (first_split + index + 1) * kSplitTokens);
      split.state = state;
      kernels_.attend(split);
    };
    if (tile.num_parts > 0) return run_split(task.split, part_of(tile, task.split));
    run_split(0, scratch.total);
    const size_t num_splits = (tile.key_end - 1) / kSplitTokens - first_split + 1;
    for (size_t index = 1; index < num_splits; ++index) {
      run_split(index, scratch.part);
      kernels_.merge(scratch.total, scratch.part, tile.num_rows, kv.value_dim);
    }
    finish(tile, scratch.total);
  }

  void merge_parts(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Tile& tile = tiles_[i];
      if (tile.num_parts == 0) continue;
      const RowState total = part_of(tile, 0);
      for (size_t split = 1; split < tile.num_parts; ++split)
        kernels_.merge(total, part_of(tile, split), tile.num_rows, step_.kv.value_dim);
      finish(tile, total);
    }
  }

  void finish(const Tile& tile, const RowState& state) {
    const size_t first_token = static_cast<size_t>(step_.query_start[tile.sequence]);
    const size_t first_head = tile.kv_head * group_;
    FinishTask task;
    task.state = state;
    task.out = static_cast<uint8_t*>(call_.out) +
               (first_token * call_.out_stride + first_head * step_.kv.value_dim) *
                   float_bytes(call_.type);
    task.type = call_.type;
    task.token_stride = call_.out_stride;
    task.group = group_;
    task.first_row = tile.first_row;
    task.num_rows = tile.num_rows;
    task.value_dim = step_.kv.value_dim;
    task.sinks = call_.rule.sinks == nullptr ? nullptr : call_.rule.sinks + first_head;
    kernels_.finish(task);
  }

  const AttentionKernels& kernels_;
  ThreadPool* pool_;
  const AttentionStep& step_;
  const AttentionCall& call_;
  size_t group_ = 1;
  size_t columns_ = 0;
  bool is_bf16_ = false;
  std::vector<Tile> tiles_;
  std::vector<Task> tasks_;
  std::unique_ptr<float[]> parts_;
};

}  // namespace

const AttentionKernels& choose_attention(Isa isa) {
#ifdef TANDEM_BUILT_ATTENTION_AVX512_BF16
  if (isa >= Isa::kAvx512Bf16) return kAttentionAvx512Bf16;
#endif
#ifdef TANDEM_BUILT_ATTENTION_AVX512_BW
  if (isa >= Isa::kAvx512Bw) return kAttentionAvx512Bw;
#endif
#ifdef TANDEM_BUILT_ATTENTION_AVX2
  if (isa >= Isa::kAvx2) return kAttentionAvx2;
#endif
  static_cast<void>(isa);
  return kAttentionPlain;
}

Status run_attention(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
                     const AttentionCall& call) {
  return Run(kernels, pool, step, call).perform();
}

}  // namespace tandem
