#include "kernels/decode_attention.h"

#include "kernels/isa.h"

namespace tandem {

void decode_attention_plain(const DecodeStep&, const DecodeQueries&, size_t, size_t);
void decode_attention_avx2(const DecodeStep&, const DecodeQueries&, size_t, size_t);
void decode_attention_avx512_bw(const DecodeStep&, const DecodeQueries&, size_t, size_t);

namespace {

// A job costs a few microseconds, the time in which one thread reads this much from the L2.
constexpr size_t kMinSharedBytes = 512 * 1024;

}  // namespace

DecodeAttentionKernel choose_decode_attention(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512Bw) return decode_attention_avx512_bw;
  if (isa >= Isa::kAvx2) return decode_attention_avx2;
#endif
  return decode_attention_plain;
}

Status run_decode_attention(DecodeAttentionKernel kernel, ThreadPool* pool, const DecodeStep& step,
                            const DecodeQueries& queries) {
  const size_t num_tasks = step.num_sequences * step.num_kv_heads;
  size_t num_tokens = 0;
  for (size_t s = 0; s < step.num_sequences; ++s)
    num_tokens += static_cast<size_t>(step.context_lens[s]);
  const size_t item_bytes = step.kv_type == FloatType::kFloat32 ? 4 : 2;
  const size_t size_bytes = num_tokens * 2 * step.num_kv_heads * step.head_dim * item_bytes;
  if (pool == nullptr || size_bytes < kMinSharedBytes) {
    kernel(step, queries, 0, num_tasks);
    return {};
  }
  return pool->parallel_for(num_tasks, 1, [&](size_t begin, size_t end, int) {
    kernel(step, queries, begin, end);
  });
}

}  // namespace tandem
