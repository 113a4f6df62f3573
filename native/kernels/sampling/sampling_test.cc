// Goal: sampling touches no memory but its own, and all ISAs choose alike.
//
// Method: exactly sized heap memory and vocabularies around the sizes of blocks and registers;
// mostly for the sanitizers. What should be chosen is tested from Python against an oracle.
#include "kernels/sampling/sampling.h"

#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/test.h"
#include "base/machine/topology.h"

namespace tandem {
namespace {

std::vector<float> make_logits(size_t size, float scale) {
  std::vector<float> logits(size);
  for (size_t i = 0; i < size; ++i)
    logits[i] = scale * std::sin(static_cast<float>(i * 7919 % 10007));
  return logits;
}

std::vector<SamplingRule> list_rules() {
  std::vector<SamplingRule> rules(8);
  rules[0].temperature = 0.0f;
  rules[2].top_k = 3;
  rules[3].top_p = 0.9;
  rules[4].min_p = 0.01f;
  rules[5].top_k = 100000;
  rules[5].top_p = 0.999999;
  rules[6].repetition_penalty = 1.5f;
  rules[6].seen_ids = {0, 5, 1 << 30, -4};
  rules[6].frequency_penalty = 0.5f;
  rules[6].note_token(2);
  rules[6].note_token(1 << 30);
  rules[7].biases = {{0, 100.0f}, {-1, 3.0f}, {1 << 30, 3.0f}};
  rules[7].stop_ids = {0, -1, 1 << 30};
  rules[7].min_tokens = 5;
  return rules;
}

std::vector<int64_t> sample_all(Isa isa, ThreadPool* pool, size_t size, float scale) {
  const std::vector<float> logits = make_logits(size * 8, scale);
  const std::vector<SamplingRule> rules = list_rules();
  std::vector<const SamplingRule*> each;
  for (const SamplingRule& rule : rules) each.push_back(&rule);
  std::vector<int64_t> all;
  for (const double draw : {0.0, 0.37, 1.0 - 0x1p-53}) {
    const std::vector<double> draws(8, draw);
    const std::vector<size_t> positions = {0, 1, 2, 3, 4, 5, 6, 7};
    std::vector<int64_t> ids(8);
    SampleTask task;
    task.logits = logits.data();
    task.logits_stride = task.vocab_size = size;
    task.num_rows = 8;
    task.rules = each.data();
    task.draws = draws.data();
    task.positions = positions.data();
    task.token_ids = ids.data();
    CHECK(run_sample(choose_sample_kernels(isa), pool, task).is_ok());
    all.insert(all.end(), ids.begin(), ids.end());
  }
  return all;
}

}  // namespace

TEST(sampling_isas_agree) {
  for (const size_t size : {1, 2, 15, 16, 63, 64, 65, 130, 5000})
    for (const float scale : {0.0f, 1.0f, 30.0f}) {
      const std::vector<int64_t> want = sample_all(Isa::kPlain, nullptr, size, scale);
      for (const int64_t id : want) CHECK(id >= 0 && static_cast<size_t>(id) < size);
      for (const Isa isa : available_isas()) CHECK(sample_all(isa, nullptr, size, scale) == want);
    }
}

TEST(sampling_threads_agree) {
  const std::unique_ptr<ThreadPool> pool =
      std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 3)).value());
  const std::vector<int64_t> want = sample_all(Isa::kPlain, nullptr, 40000, 3.0f);
  CHECK(sample_all(available_isas().back(), pool.get(), 40000, 3.0f) == want);
}

TEST(sampling_broken_rows) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Isa isa : available_isas())
    for (const float bad : {std::nanf(""), inf, -inf})
      for (const size_t size : {1, 64, 65}) {
        std::vector<float> logits(size, -inf);
        logits[size - 1] = bad;
        const SamplingRule rule;
        const SamplingRule* rules[] = {&rule};
        const double draw = 0.5;
        const size_t position = 0;
        int64_t id = 7;
        SampleTask task;
        task.logits = logits.data();
        task.logits_stride = task.vocab_size = size;
        task.num_rows = 1;
        task.rules = rules;
        task.draws = &draw;
        task.positions = &position;
        task.token_ids = &id;
        CHECK(run_sample(choose_sample_kernels(isa), nullptr, task).is_ok());
        CHECK_EQ(id, kBrokenRow);
      }
}

TEST(logprobs_stay_in_bounds) {
  for (const Isa isa : available_isas())
    for (const size_t size : {1, 63, 64, 65, 4099}) {
      const std::vector<float> logits = make_logits(2 * size, 3.0f);
      const std::vector<int64_t> token_ids = {0, static_cast<int64_t>(size) - 1};
      const size_t num_top = (size + 2) / 3;
      std::vector<double> logprobs(2), top_logprobs(2 * num_top);
      std::vector<int64_t> top_ids(2 * num_top);
      LogprobTask task;
      task.logits = logits.data();
      task.logits_stride = task.vocab_size = size;
      task.num_rows = 2;
      task.token_ids = token_ids.data();
      task.num_top = num_top;
      task.logprobs = logprobs.data();
      task.top_ids = top_ids.data();
      task.top_logprobs = top_logprobs.data();
      CHECK(run_logprobs(choose_sample_kernels(isa), nullptr, task).is_ok());
      for (const double value : top_logprobs) CHECK(value <= 1e-6 && value > -20.0);
      for (const double value : logprobs) CHECK(value <= 1e-6 && value > -20.0);
    }
}

}  // namespace tandem
