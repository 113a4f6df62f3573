// Goal: attention touches no memory but its own, whatever the sizes, and all ISAs agree.
//
// Method: exactly sized heap memory, sizes that are no multiple of a register, blocks of all sizes,
// every type of stored keys and values; mostly for the sanitizers. What the results should be is
// tested from Python against an oracle.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/test.h"
#include "base/machine/topology.h"
#include "kernels/attention/kv_store.h"

namespace tandem {
namespace {

struct Shape {
  KvType type;
  size_t kv_heads, group, key_dim, value_dim, block_size;
  std::vector<int64_t> num_queries, context_lens;
  int64_t window;
  bool is_latent() const { return key_dim != value_dim; }
  size_t item_bytes() const {
    return type == KvType::kFloat32 ? 4 : (type == KvType::kBfloat16 ? 2 : 1);
  }
};

float value_at(size_t i) { return std::sin(static_cast<float>(i * 37 % 1009)); }

KvView make_view(const Shape& shape, size_t num_blocks, std::vector<uint8_t>& memory) {
  KvView kv;
  const size_t kinds = shape.is_latent() ? 1 : 2;
  kv.type = shape.type;
  kv.num_blocks = num_blocks;
  kv.num_layers = 2;
  kv.num_kv_heads = shape.kv_heads;
  kv.block_size = shape.block_size;
  kv.key_dim = shape.key_dim;
  kv.value_dim = shape.value_dim;
  kv.row_bytes = shape.key_dim * shape.item_bytes();
  kv.head_bytes = kv.row_bytes * shape.block_size;
  kv.value_offset = shape.is_latent() ? 0 : kv.head_bytes * shape.kv_heads;
  kv.layer_bytes = kinds * kv.head_bytes * shape.kv_heads;
  if (shape.item_bytes() == 1) {
    kv.key_scale_offset = kv.layer_bytes;
    kv.value_scale_offset =
        kv.layer_bytes + (kinds - 1) * shape.kv_heads * shape.block_size * 2;
    kv.layer_bytes += kinds * shape.kv_heads * shape.block_size * 2;
  }
  kv.block_bytes = kv.layer_bytes * kv.num_layers;
  // What is not written is NaN: reading it would show.
  memory.assign(kv.block_bytes * num_blocks, 0xff);
  kv.base = memory.data();
  return kv;
}

std::vector<float> run(const Shape& shape, Isa isa, ThreadPool* pool) {
  AttentionStep step;
  step.context_lens = shape.context_lens;
  step.query_start = {0};
  size_t width = 0, num_blocks = 0;
  for (size_t s = 0; s < shape.num_queries.size(); ++s) {
    step.query_start.push_back(step.query_start.back() + shape.num_queries[s]);
    width = std::max(width, (static_cast<size_t>(shape.context_lens[s]) - 1) / shape.block_size + 1);
  }
  std::vector<int64_t> table(width * shape.num_queries.size());
  // Blocks in descending order, so that neighbours in a sequence are not in memory.
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int64_t>(table.size() - 1 - i);
  num_blocks = table.size();
  std::vector<uint8_t> memory;
  step.kv = make_view(shape, num_blocks, memory);
  step.block_table = table.data();
  step.table_width = width;

  // The whole contexts are stored, then the last queries attend.
  AttentionStep whole = step;
  whole.query_start = {0};
  for (const int64_t length : shape.context_lens)
    whole.query_start.push_back(whole.query_start.back() + length);
  const size_t heads = (shape.is_latent() ? 1 : 2) * shape.kv_heads;
  std::vector<float> rows(static_cast<size_t>(whole.query_start.back()) * heads * shape.key_dim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = value_at(i);
  KvRows source;
  source.keys = rows.data();
  source.stride = heads * shape.key_dim;
  source.layer_offset = step.kv.layer_bytes;
  CHECK(store_kv(pool, whole, source).is_ok());

  const size_t num_tokens = static_cast<size_t>(step.query_start.back());
  const size_t num_heads = shape.kv_heads * shape.group;
  std::vector<float> q(num_tokens * num_heads * shape.key_dim);
  for (size_t i = 0; i < q.size(); ++i) q[i] = value_at(i + 5);
  std::vector<float> sinks(num_heads, 0.5f);
  std::vector<float> out(num_tokens * num_heads * shape.value_dim, 99.0f);
  AttentionCall call;
  call.q = q.data();
  call.q_stride = num_heads * shape.key_dim;
  call.out = out.data();
  call.out_stride = num_heads * shape.value_dim;
  call.num_heads = num_heads;
  call.layer_offset = step.kv.layer_bytes;
  call.rule = {0.3f, 5.0f, shape.window, sinks.data()};
  CHECK(run_attention(choose_attention(isa), pool, step, call).is_ok());
  // The same in bf16, whose memory differs; its results are for Python to judge.
  std::vector<uint16_t> short_q(q.size(), 0x3f80), short_out(out.size());
  AttentionCall short_call = call;
  short_call.q = short_q.data();
  short_call.out = short_out.data();
  short_call.type = FloatType::kBfloat16;
  CHECK(run_attention(choose_attention(isa), pool, step, short_call).is_ok());
  return out;
}

void compare_isas(const Shape& shape) {
  const std::unique_ptr<ThreadPool> pool =
      std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 2)).value());
  const std::vector<float> want = run(shape, Isa::kPlain, nullptr);
  for (const float value : want) CHECK(std::isfinite(value));
  for (const Isa isa : available_isas())
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), pool.get()})
      CHECK(run(shape, isa, threads) == want);
}

}  // namespace

TEST(attention_stays_in_its_memory_float) {
  compare_isas({KvType::kFloat32, 2, 3, 20, 20, 7, {1, 3, 9}, {1, 70, 9}, 0});
  compare_isas({KvType::kFloat32, 1, 1, 64, 64, 64, {130}, {130}, 40});
  compare_isas({KvType::kFloat32, 1, 2, 1, 1, 1, {2}, {2}, 0});
  // Few rows, whose values are not packed: a block of registers, one less, and half.
  compare_isas({KvType::kFloat32, 2, 8, 64, 64, 7, {1, 1}, {70, 1}, 0});
  compare_isas({KvType::kFloat32, 1, 7, 64, 64, 64, {1}, {65}, 0});
  compare_isas({KvType::kFloat32, 1, 4, 128, 128, 5, {1}, {66}, 3});
}

TEST(attention_stays_in_its_memory_bf16) {
  compare_isas({KvType::kBfloat16, 2, 3, 18, 18, 5, {1, 65}, {66, 65}, 0});
  compare_isas({KvType::kBfloat16, 1, 2, 33, 33, 64, {2}, {65}, 3});
  compare_isas({KvType::kBfloat16, 2, 8, 64, 64, 7, {1, 1}, {71, 1}, 0});
  compare_isas({KvType::kBfloat16, 1, 3, 64, 64, 64, {1}, {65}, 0});
}

TEST(attention_stays_in_its_memory_codes) {
  for (const KvType type : {KvType::kInt8, KvType::kFp8}) {
    compare_isas({type, 2, 2, 20, 20, 9, {1, 11}, {64, 71}, 0});
    compare_isas({type, 1, 1, 7, 7, 3, {4}, {9}, 0});
    compare_isas({type, 2, 8, 64, 64, 9, {1}, {71}, 0});
    compare_isas({type, 1, 5, 72, 64, 9, {1, 2}, {71, 9}, 0});
  }
}

TEST(attention_stays_in_its_memory_latent) {
  compare_isas({KvType::kFloat32, 1, 130, 24, 17, 16, {2}, {80}, 0});
  compare_isas({KvType::kBfloat16, 1, 5, 41, 32, 4, {1, 3}, {1, 64}, 0});
}

TEST(attention_merges_splits) {
  compare_isas({KvType::kBfloat16, 1, 2, 8, 8, 64, {1, 2}, {2100, 1025}, 1500});
}

}  // namespace tandem
