// The assignment of tokens to experts, and scratch memory, for the forward and the backward pass of
// an ExpertBank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/experts/experts.h"

namespace tandem {

// The (token, slot) pairs sorted by expert; within an expert by token, then slot.
struct ExpertBank::Routing {
  struct Active {
    size_t expert_id;
    size_t first_pair;
    size_t num_pairs;
  };
  std::vector<Active> active;  // Ascending expert ids.
  std::vector<int32_t> tokens;
  std::vector<float> weights;
  std::vector<int32_t> slots;  // Of each pair: token * top_k + slot.
};

struct ExpertBank::Scratch {
  Operand x;
  std::vector<Operand> h;          // Of each part; without data where only gate and up are wanted.
  std::vector<const float*> sums;  // Of each part, [tokens, hidden]; empty for one part.
  const float* delta = nullptr;    // See Batch.
  void* kept = nullptr;
  const uint8_t* const* addresses = nullptr;  // See Batch.
};

}  // namespace tandem
