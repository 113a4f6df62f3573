// Attention of a step's tokens over keys and values in paged blocks, read where they lie: decode
// and prefill, grouped queries (GQA) and one latent head for all (MLA).
//
// A row is one query of one head; the rows of a sequence that share a KV head are numbered token by
// token. Keys are visited in tiles of 64 at fixed positions, with a running maximum and sum, in
// splits of kSplitTokens at fixed positions, whose partial results are merged in ascending order.
// So what a row gets depends on its own query, position and context alone: bitwise the same alone
// and in company, decoded and prefilled, in one piece and in chunks, for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/attention/attention_kernels.h"
#include "kernels/vectors/isa.h"

namespace tandem {

// The sequences of a step and their KV blocks, planned once for all layers. Pointers are borrowed.
struct AttentionStep {
  KvView kv;
  const int64_t* block_table = nullptr;  // [sequences][table_width]; ids were checked.
  size_t table_width = 0;
  std::vector<int64_t> query_start;   // sequences + 1 row numbers of tokens.
  std::vector<int64_t> context_lens;  // This step's tokens included.
  size_t num_sequences() const { return context_lens.size(); }
};

// The queries of one layer, and the place of the result.
struct AttentionCall {
  const void* q = nullptr;  // [tokens][num_heads][key_dim]; tokens `q_stride` items apart.
  size_t q_stride = 0;
  void* out = nullptr;  // [tokens][num_heads][value_dim]; tokens `out_stride` items apart.
  size_t out_stride = 0;
  FloatType type = FloatType::kFloat32;
  size_t num_heads = 0;  // A multiple of the KV heads.
  size_t layer_offset = 0;  // Bytes from a block's begin to the layer's keys.
  AttentionRule rule;
  // [tokens][num_chosen] positions, ascending, of the keys that each token attends to; null: each
  // attends to all up to its own. A token at a position below num_chosen attends to all keys before
  // it in any case, and its row is not read.
  const int32_t* chosen = nullptr;
  size_t num_chosen = 0;
};

// Returns the attention kernels for an ISA of `available_isas()`.
const AttentionKernels& choose_attention(Isa isa);

// Runs attention in one layer, on `pool` if it is given and the work is enough to share. REQUIRES:
// what the structs state. Errors: those of the pool.
Status run_attention(const AttentionKernels& kernels, ThreadPool* pool, const AttentionStep& step,
                     const AttentionCall& call);

}  // namespace tandem
