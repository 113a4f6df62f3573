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

// The sampling parameters of a request, and the tokens that it must remember for them. Not safe for
// use by two threads at once.
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
  // Counts a chosen token for the penalties; a rule without penalties counts nothing.
  void note_token(int64_t token_id);
  // Applies penalties, then biases, then the ban on stop ids to a row of logits; ids outside the
  // vocabulary are skipped.
  void edit(float* logits, size_t vocab_size, size_t position) const;
};

// Token id of a row from which no token can be drawn: it has a NaN, an infinity as its largest
// logit, or nothing but -inf.
inline constexpr int64_t kBrokenRow = -1;

// Sampling of one token per row. Tokens, ordered by logit (of equal ones the lower id first), are
// cut by min_p (relative to the largest probability), top_k and top_p; top_p counts the probability
// of the tokens that the other two left. The drawn token is the first at which the cumulated
// probability exceeds the draw's share of the whole. If nothing is cut, tokens are cumulated in the
// order of their ids.
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

// Natural log-probabilities under the unmodified logits: of one given token per row, and of the
// row's likeliest tokens.
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

// Results of one pass over a row of logits, in blocks of 64: the largest logit, and if there is a
// NaN.
struct RowScan {
  float top = 0.0f;
  bool has_nan = false;
};
inline constexpr size_t kSampleBlock = 64;

// The sampling kernels of one ISA.
struct SampleKernels {
  // Writes the largest logit of each block to `block_tops`.
  RowScan (*scan)(const float* logits, size_t size, float* block_tops);
  // Computes weights[i] = exp((logits[i] - top) * inverse_temperature); 0 below exp(-87).
  void (*weigh)(const float* logits, size_t size, float top, float inverse_temperature,
                float* weights);
  // Writes for each block the sum of the weights of all blocks up to it; returns the sum of all
  // weights.
  double (*sum)(const float* logits, size_t size, float top, float inverse_temperature,
                double* cumulated);
};

const SampleKernels& choose_sample_kernels(Isa isa);

// These functions run all rows of a task, on `pool` if it is given and the work is enough to share.
// REQUIRES: what the structs state; pointers are borrowed for the call.
Status run_sample(const SampleKernels& kernels, ThreadPool* pool, const SampleTask& task);
Status run_logprobs(const SampleKernels& kernels, ThreadPool* pool, const LogprobTask& task);

}  // namespace tandem
