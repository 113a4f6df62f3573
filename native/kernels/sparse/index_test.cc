// Goal: an index chooses the best scores, of equal ones the lowest position, in every regime alike,
// and touches no memory but its own.
//
// Method: choices against a sort; exactly sized heap memory; ISAs, threads and chunks compared.
#include "kernels/sparse/index.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/machine/topology.h"
#include "base/test.h"
#include "kernels/attention/kv_store.h"

namespace tandem {
namespace {

std::vector<int32_t> choose_by_sort(const std::vector<float>& scores, size_t count) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(count);
  std::sort(order.begin(), order.end());
  return order;
}

constexpr size_t kHeads = 5, kDim = 20, kTop = 70;

// The choices of the last `num_queries` tokens of one sequence, in steps of `chunk`.
std::vector<int32_t> run(KvType type, size_t length, size_t num_queries, size_t chunk, Isa isa,
                         ThreadPool* pool) {
  constexpr size_t kBlock = 7, kOffset = 12;
  const size_t item = type == KvType::kFloat32 ? 4 : (type == KvType::kBfloat16 ? 2 : 1);
  AttentionStep step;
  KvView& kv = step.kv;
  kv.type = type;
  kv.num_layers = kv.num_kv_heads = 1;
  kv.block_size = kBlock;
  kv.key_dim = kv.value_dim = kDim;
  kv.row_bytes = kDim * item;
  kv.head_bytes = kv.row_bytes * kBlock;
  kv.key_scale_offset = kv.value_scale_offset = kv.head_bytes;
  kv.block_bytes = kOffset + kv.head_bytes + 16;
  const size_t num_blocks = (length - 1) / kBlock + 1;
  kv.num_blocks = num_blocks;
  std::vector<uint8_t> memory(num_blocks * kv.block_bytes, 0xff);
  kv.base = memory.data();
  std::vector<int64_t> table(num_blocks);
  for (size_t i = 0; i < num_blocks; ++i) table[i] = static_cast<int64_t>(num_blocks - 1 - i);
  step.block_table = table.data();
  step.table_width = num_blocks;
  std::vector<float> keys(length * kDim), q(num_queries * kHeads * kDim),
      weights(num_queries * kHeads);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = std::sin(static_cast<float>(i * 37 % 1009));
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::cos(static_cast<float>(i * 31 % 997));
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = std::sin(static_cast<float>(i * 17 % 101)) + 0.3f;
  step.query_start = {0, static_cast<int64_t>(length)};
  step.context_lens = {static_cast<int64_t>(length)};
  KvRows source;
  source.keys = keys.data();
  source.stride = kDim;
  source.layer_offset = kOffset;
  CHECK(store_kv(pool, step, source).is_ok());
  std::vector<int32_t> chosen(num_queries * kTop, -1);
  for (size_t first = 0; first < num_queries; first += chunk) {
    const size_t count = std::min(chunk, num_queries - first);
    step.query_start = {0, static_cast<int64_t>(count)};
    step.context_lens = {static_cast<int64_t>(length - num_queries + first + count)};
    IndexCall call;
    call.q = q.data() + first * kHeads * kDim;
    call.q_stride = kHeads * kDim;
    call.num_heads = kHeads;
    call.weights = weights.data() + first * kHeads;
    call.weight_stride = kHeads;
    call.scale = 0.7f;
    call.layer_offset = kOffset;
    call.chosen = chosen.data() + first * kTop;
    call.num_chosen = kTop;
    CHECK(run_index(choose_attention(isa), pool, step, call).is_ok());
  }
  return chosen;
}

}  // namespace

TEST(the_largest_are_chosen_as_by_a_sort) {
  uint32_t state = 7;
  for (const size_t size : {1u, 5u, 64u, 1000u}) {
    std::vector<float> scores(size);
    for (float& score : scores) {
      state = state * 1664525u + 1013904223u;
      // Many equal ones, of both signs.
      score = static_cast<float>(static_cast<int>(state >> 24) % 9 - 4) / 3.0f;
      if (score == 0.0f) score = 0.0f;
    }
    for (const size_t count : {size_t{1}, size / 2 + 1, size}) {
      std::vector<int32_t> chosen(count);
      choose_largest(scores.data(), size, count, chosen.data());
      CHECK(chosen == choose_by_sort(scores, count));
    }
  }
}

TEST(infinities_and_nan_have_an_order) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> scores = {1.0f, -inf, std::nanf(""), inf, 2.0f};
  std::vector<int32_t> chosen(3);
  choose_largest(scores.data(), scores.size(), 3, chosen.data());
  CHECK(chosen == (std::vector<int32_t>{2, 3, 4}));
}

TEST(choices_depend_on_no_isa_thread_or_chunk) {
  const std::unique_ptr<ThreadPool> pool =
      std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 2)).value());
  for (const KvType type :
       {KvType::kFloat32, KvType::kBfloat16, KvType::kFp8, KvType::kInt8}) {
    const std::vector<int32_t> want = run(type, 201, 150, 150, Isa::kPlain, nullptr);
    // Tokens that see no more than they may choose get all.
    for (size_t i = 0; i < 52; ++i) CHECK_EQ(want[i], static_cast<int32_t>(i));
    CHECK_EQ(want[52], 0);
    for (const Isa isa : available_isas())
      for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), pool.get()})
        for (const size_t chunk : {1u, 13u, 150u})
          CHECK(run(type, 201, 150, chunk, isa, threads) == want);
  }
}

}  // namespace tandem
