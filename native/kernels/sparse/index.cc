#include "kernels/sparse/index.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/weights/packing.h"

namespace tandem {
namespace {

// Number of scores that are held at a time; more tokens are scored in groups, one after the other.
constexpr size_t kMaxScores = 4 << 20;
// Number of keys that one task scores, so that threads can share the context of a single decode.
constexpr size_t kTaskKeys = 4096;
// Least number of scores for which another thread is worth waking.
constexpr size_t kMinSharedScores = 2048;

// Returns an unsigned number that is ordered like the score.
uint32_t order_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  if (score != score) return ~uint32_t{0};
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Tokens of one sequence that are scored together.
struct ScoredTokens {
  size_t sequence, first_token, num_tokens;
  size_t num_keys;  // That the last of them sees.
  size_t first_score;
};
struct ScoreShare {
  size_t tile, key_begin, key_end;
};

class IndexScratch {
 public:
  TileScratch tile{};
  void* queries = nullptr;

  void reserve(size_t key_dim) {
    const size_t k = round_up(key_dim, kColumnStep);
    const size_t scores = kTileRows * kTileTokens * 4, keys = k * kTileTokens * 4;
    const size_t total = scores + keys + (kTileRows * k + 64) * 4 + 64;
    if (total > capacity_) {
      memory_.reset(new uint8_t[total]);
      capacity_ = total;
    }
    uint8_t* next = reinterpret_cast<uint8_t*>(
        round_up(reinterpret_cast<uintptr_t>(memory_.get()), 64));
    tile.scores = reinterpret_cast<float*>(next);
    tile.keys = next + scores;
    queries = next + scores + keys;
  }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  size_t capacity_ = 0;
};

class IndexRun {
 public:
  IndexRun(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
      const IndexCall& call)
      : kernels_(kernels), pool_(pool), step_(step), call_(call) {
    is_bf16_ = call.type == FloatType::kBfloat16 && step.kv.type != KvType::kFloat32;
  }

  Status perform() {
    const size_t most = std::max<size_t>(1, kTileRows / call_.num_heads);
    for (size_t sequence = 0; sequence < step_.num_sequences(); ++sequence) {
      const size_t num_tokens = tokens_of(sequence), top = call_.num_chosen;
      size_t token = 0;
      for (; token < num_tokens && seen_by(sequence, token) <= top; ++token)
        choose_all(sequence, token);
      while (token < num_tokens) {
        const size_t count = std::min(most, num_tokens - token);
        const size_t num_keys = seen_by(sequence, token + count - 1);
        const size_t size = round_up(num_keys, kTileTokens) * count;
        if (!tiles_.empty() && num_scores_ + size > kMaxScores) {
          const Status status = perform_tiles();
          if (!status.is_ok()) return status;
        }
        tiles_.push_back({
            .sequence = sequence,
            .first_token = token,
            .num_tokens = count,
            .num_keys = num_keys,
            .first_score = num_scores_});
        num_scores_ += size;
        token += count;
      }
    }
    return perform_tiles();
  }

 private:
  size_t tokens_of(size_t sequence) const {
    return static_cast<size_t>(step_.query_start[sequence + 1] - step_.query_start[sequence]);
  }
  size_t seen_by(size_t sequence, size_t token) const {
    return static_cast<size_t>(step_.context_lens[sequence]) - tokens_of(sequence) + token + 1;
  }
  int32_t* choice_of(size_t sequence, size_t token) const {
    return call_.chosen +
           (static_cast<size_t>(step_.query_start[sequence]) + token) * call_.num_chosen;
  }

  void choose_all(size_t sequence, size_t token) const {
    int32_t* out = choice_of(sequence, token);
    const size_t seen = seen_by(sequence, token);
    for (size_t i = 0; i < call_.num_chosen; ++i) out[i] = i < seen ? static_cast<int32_t>(i) : 0;
  }

  Status perform_tiles() {
    if (scores_capacity_ < num_scores_) {
      scores_.reset(new float[num_scores_]);
      scores_capacity_ = num_scores_;
    }
    std::vector<ScoreShare> tasks;
    std::vector<std::pair<size_t, size_t>> choices;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      for (size_t begin = 0; begin < tiles_[i].num_keys; begin += kTaskKeys)
        tasks.push_back({
            .tile = i,
            .key_begin = begin,
            .key_end = std::min(tiles_[i].num_keys, begin + kTaskKeys)});
      for (size_t token = 0; token < tiles_[i].num_tokens; ++token) choices.push_back({i, token});
    }
    const auto score = [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) perform_task(tasks[i]);
    };
    const auto choose = [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) choose_token(tiles_[choices[i].first], choices[i].second);
    };
    Status status;
    if (pool_ == nullptr || num_scores_ < kMinSharedScores) {
      score(0, tasks.size(), 0);
      choose(0, choices.size(), 0);
    } else {
      status = pool_->parallel_for(tasks.size(), 1, score);
      if (status.is_ok()) status = pool_->parallel_for(choices.size(), 1, choose);
    }
    tiles_.clear();
    num_scores_ = 0;
    return status;
  }

  float* scores_of(const ScoredTokens& tile, size_t token) const {
    return scores_.get() + tile.first_score + token * round_up(tile.num_keys, kTileTokens);
  }

  void perform_task(const ScoreShare& task) const {
    thread_local IndexScratch scratch;
    const KvView& kv = step_.kv;
    scratch.reserve(kv.key_dim);
    const ScoredTokens& tile = tiles_[task.tile];
    const size_t first = static_cast<size_t>(step_.query_start[tile.sequence]) + tile.first_token;
    QueryRows rows;
    rows.q = static_cast<const uint8_t*>(call_.q) +
             first * call_.q_stride * float_bytes(call_.type);
    rows.type = call_.type;
    rows.token_stride = call_.q_stride;
    rows.group = call_.num_heads;
    rows.num_rows = tile.num_tokens * call_.num_heads;
    rows.key_dim = kv.key_dim;
    kernels_.load_queries(rows, scratch.queries, is_bf16_);
    ScoreTask score{};
    score.rows = {
        .kv = &kv,
        .blocks = step_.block_table + tile.sequence * step_.table_width,
        .layer_offset = call_.layer_offset,
        .kv_head = 0,
        .positions = nullptr};
    score.queries = scratch.queries;
    score.is_bf16 = is_bf16_;
    score.num_heads = call_.num_heads;
    score.num_tokens = tile.num_tokens;
    score.weights = call_.weights + first * call_.weight_stride;
    score.weight_stride = call_.weight_stride;
    score.scale = call_.scale;
    score.key_begin = task.key_begin;
    score.key_end = task.key_end;
    score.scratch = scratch.tile;
    score.out = scores_of(tile, 0);
    score.out_stride = round_up(tile.num_keys, kTileTokens);
    kernels_.score(score);
  }

  void choose_token(const ScoredTokens& tile, size_t token) const {
    const size_t own = tile.first_token + token;
    choose_largest(scores_of(tile, token), seen_by(tile.sequence, own), call_.num_chosen,
                   choice_of(tile.sequence, own));
  }

  const AttentionKernels& kernels_;
  ThreadPool* pool_;
  const AttentionStep& step_;
  const IndexCall& call_;
  bool is_bf16_ = false;
  std::vector<ScoredTokens> tiles_;
  size_t num_scores_ = 0;
  std::unique_ptr<float[]> scores_;
  size_t scores_capacity_ = 0;
};

}  // namespace

void choose_largest(const float* scores, size_t num_scores, size_t count, int32_t* chosen) {
  thread_local std::vector<uint32_t> orders;
  orders.resize(num_scores);
  for (size_t i = 0; i < num_scores; ++i) orders[i] = order_of(scores[i]);
  // Find the order number of the last chosen score from its highest bits down (radix select): all
  // scores above it are chosen, and of those equal to it the first `left`.
  constexpr int kSteps[] = {11, 11, 10};
  uint32_t prefix = 0, mask = 0;
  size_t left = count;
  int shift = 32;
  uint32_t counts[1 << 11];
  for (const int bits : kSteps) {
    shift -= bits;
    const uint32_t last = (1u << bits) - 1;
    std::memset(counts, 0, sizeof counts);
    for (size_t i = 0; i < num_scores; ++i)
      if ((orders[i] & mask) == prefix) ++counts[orders[i] >> shift & last];
    uint32_t bucket = last;
    for (; bucket > 0 && counts[bucket] < left; --bucket) left -= counts[bucket];
    prefix |= bucket << shift;
    mask |= last << shift;
  }
  size_t next = 0;
  for (size_t i = 0; i < num_scores && next < count; ++i) {
    if (orders[i] < prefix) continue;
    if (orders[i] == prefix) {
      if (left == 0) continue;
      --left;
    }
    chosen[next++] = static_cast<int32_t>(i);
  }
}

Status run_index(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
                 const IndexCall& call) {
  return IndexRun(kernels, pool, step, call).perform();
}

}  // namespace tandem
