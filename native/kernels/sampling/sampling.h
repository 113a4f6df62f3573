// Choosing tokens from rows of logits, and log-probabilities of them. Rows are independent, and all
// sums have one order: a row's results are bitwise the same alone and in company, for any number of
// threads and on every ISA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/threads/thread_pool.h"
#include "kernels/vectors/isa.h"

namespace tandem {

// What a request asks of its tokens, and what it must remember of them. Not safe for use by two
// threads at once.
struct SamplingRule {
  float temperature = 1.0f;  // 0 takes the largest logit.
  size_t top_k = 0;          // 0 is all.
  double top_p = 1.0;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // Divides positive logits of tokens seen, multiplies others.
  float frequency_penalty = 0.0f;   // Subtracted for each time a token was chosen.
  float presence_penalty = 0.0f;    // Subtracted once.
  size_t min_tokens = 0;            // Before this position `stop_ids` are not chosen.
  std::vector<int64_t> seen_ids;    // Of prompt and output, each once; kept for the repetition.
  std::vector<std::pair<int64_t, float>> biases;
  std::vector<int64_t> stop_ids;
  std::unordered_map<int64_t, size_t> counts;  // Of chosen tokens; kept for the penalties.

  bool has_penalties() const {
    return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
  }
  bool edits_at(size_t position) const {
    return has_penalties() || !biases.empty() || (position < min_tokens && !stop_ids.empty());
  }
  // Counts a chosen token; a rule without penalties forgets it.
  void note_token(int64_t token_id);
  // Penalties, then biases, then stop ids; ids outside of the vocabulary are passed over.
  void edit(float* logits, size_t vocab_size, size_t position) const;
};

// A row without a distribution: a NaN, an infinity as its largest logit, or nothing but -inf.
inline constexpr int64_t kBrokenRow = -1;

// One token per row. The tokens in question, ordered by logit (of equals the lower id first), are
// cut by min_p (of the largest probability), top_k and top_p; the mass of top_p counts what the
// other two left. The token is the first at which the cumulated mass exceeds the draw's share of
// the whole; where nothing is cut, tokens are cumulated in the order of their ids.
struct SampleTask {
  const float* logits = nullptr;  // Rows `logits_stride` items apart; not modified.
  size_t logits_stride = 0;
  size_t num_rows = 0;
  size_t vocab_size = 0;
  const SamplingRule* const* rules = nullptr;  // [rows]
  const double* draws = nullptr;               // [rows], in [0, 1).
  const size_t* positions = nullptr;           // [rows], of the token in its request's output.
  int64_t* token_ids = nullptr;                // [rows], written; kBrokenRow where there is none.
};

// Natural log-probabilities under the logits as they are: of a row's token, and of its likeliest.
struct LogprobTask {
  const float* logits = nullptr;
  size_t logits_stride = 0;
  size_t num_rows = 0;
  size_t vocab_size = 0;
  const int64_t* token_ids = nullptr;  // [rows], in [0, vocab_size).
  size_t num_top = 0;                  // At most vocab_size.
  double* logprobs = nullptr;          // [rows], written; NaN where the row has no distribution.
  int64_t* top_ids = nullptr;          // [rows][num_top], best first; of equals the lower id.
  double* top_logprobs = nullptr;      // [rows][num_top]
};

// The largest logit and what else one pass can tell; logits are walked in blocks of 64.
struct RowScan {
  float top = 0.0f;
  bool has_nan = false;
};
inline constexpr size_t kSampleBlock = 64;

// The functions of one ISA.
struct SampleKernels {
  // Writes the largest logit of each block.
  RowScan (*scan)(const float* logits, size_t size, float* block_tops);
  // weights[i] = exp((logits[i] - top) * inverse_temperature), 0 below exp(-87).
  void (*weigh)(const float* logits, size_t size, float top, float inverse_temperature,
                float* weights);
  // Writes the sum of the weights of all blocks up to and with each; returns that of all.
  double (*sum)(const float* logits, size_t size, float top, float inverse_temperature,
                double* cumulated);
};

const SampleKernels& choose_sample_kernels(Isa isa);

// Run all rows, on `pool` if it is given and there is enough to share. REQUIRES: what the structs
// say; pointers are borrowed for the call.
Status run_sample(const SampleKernels& kernels, ThreadPool* pool, const SampleTask& task);
Status run_logprobs(const SampleKernels& kernels, ThreadPool* pool, const LogprobTask& task);

}  // namespace tandem
