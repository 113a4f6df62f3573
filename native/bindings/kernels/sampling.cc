#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/sampling/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

const SampleKernels& sample_kernels(const std::string& isa) {
  return choose_sample_kernels(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
}

void check_logits(const char* where, const TensorView& logits) {
  if (logits.num_dims() != 2 || !logits.is_float32() || !logits.is_dense_from(1) ||
      logits.shape(1) == 0 || logits.shape(1) > INT32_MAX)
    refuse_view(where, "logits", logits, "give float32 [rows, vocabulary] with dense rows");
}

void check_count(const char* where, const char* name, size_t count, size_t rows) {
  if (count == rows) return;
  raise({Code::kShape, where,
         std::to_string(count) + " " + name + " for " + std::to_string(rows) +
             " rows of logits: give one for each",
         name});
}

SamplingRule make_rule(float temperature, size_t top_k, double top_p, float min_p,
                       float repetition_penalty, float frequency_penalty, float presence_penalty,
                       size_t min_tokens, std::vector<int64_t> prompt_ids,
                       std::vector<std::pair<int64_t, float>> biases,
                       std::vector<int64_t> stop_ids) {
  if (!(temperature >= 0.0f) || !(top_p > 0.0) || !(min_p >= 0.0f) || !(min_p <= 1.0f) ||
      !(repetition_penalty > 0.0f))
    raise({Code::kConfig, "kernels.sampling_rule",
           "temperature " + std::to_string(temperature) + ", top_p " + std::to_string(top_p) +
               ", min_p " + std::to_string(min_p) + ", repetition_penalty " +
               std::to_string(repetition_penalty) +
               ": give at least 0, above 0, 0 to 1, and above 0",
           "sampling"});
  SamplingRule rule;
  rule.temperature = temperature;
  rule.top_k = top_k;
  rule.top_p = top_p;
  rule.min_p = min_p;
  rule.repetition_penalty = repetition_penalty;
  rule.frequency_penalty = frequency_penalty;
  rule.presence_penalty = presence_penalty;
  rule.min_tokens = min_tokens;
  if (repetition_penalty != 1.0f) {
    rule.seen_ids = std::move(prompt_ids);
    std::sort(rule.seen_ids.begin(), rule.seen_ids.end());
    rule.seen_ids.erase(std::unique(rule.seen_ids.begin(), rule.seen_ids.end()),
                        rule.seen_ids.end());
  }
  rule.biases = std::move(biases);
  rule.stop_ids = std::move(stop_ids);
  return rule;
}

std::vector<int64_t> sample_tokens(const TensorView& logits,
                                   const std::vector<const SamplingRule*>& rules,
                                   const std::vector<double>& draws,
                                   const std::vector<size_t>& positions, ThreadPool* pool,
                                   const std::string& isa) {
  constexpr const char* kWhere = "kernels.sample_tokens";
  check_logits(kWhere, logits);
  const size_t rows = logits.shape(0);
  check_count(kWhere, "rules", rules.size(), rows);
  check_count(kWhere, "draws", draws.size(), rows);
  check_count(kWhere, "positions", positions.size(), rows);
  for (const SamplingRule* rule : rules)
    if (rule == nullptr) raise({Code::kShape, kWhere, "a rule is None: give one a row", "rules"});
  for (const double draw : draws)
    if (!(draw >= 0.0 && draw < 1.0))
      raise({Code::kShape, kWhere, "a draw is " + std::to_string(draw) + ": give 0 <= draw < 1",
             "draws"});
  std::vector<int64_t> token_ids(rows);
  SampleTask task;
  task.logits = static_cast<const float*>(logits.data());
  task.logits_stride = logits.stride(0);
  task.num_rows = rows;
  task.vocab_size = logits.shape(1);
  task.rules = rules.data();
  task.draws = draws.data();
  task.positions = positions.data();
  task.token_ids = token_ids.data();
  const SampleKernels& kernels = sample_kernels(isa);
  run_released([&] { return run_sample(kernels, pool, task); });
  return token_ids;
}

std::tuple<std::vector<double>, std::vector<int64_t>, std::vector<double>> gather_logprobs(
    const TensorView& logits, const std::vector<int64_t>& token_ids, size_t num_top,
    ThreadPool* pool, const std::string& isa) {
  constexpr const char* kWhere = "kernels.gather_logprobs";
  check_logits(kWhere, logits);
  const size_t rows = logits.shape(0), vocab_size = logits.shape(1);
  check_count(kWhere, "token_ids", token_ids.size(), rows);
  for (const int64_t id : token_ids)
    if (id < 0 || static_cast<size_t>(id) >= vocab_size)
      raise({Code::kShape, kWhere,
             "token " + std::to_string(id) + " of a vocabulary of " + std::to_string(vocab_size) +
                 ": give ids within it",
             "token_ids"});
  if (num_top > vocab_size)
    raise({Code::kShape, kWhere,
           std::to_string(num_top) + " likeliest of " + std::to_string(vocab_size) +
               " tokens: ask for at most all",
           "num_top"});
  std::vector<double> logprobs(rows), top_logprobs(rows * num_top);
  std::vector<int64_t> top_ids(rows * num_top);
  LogprobTask task;
  task.logits = static_cast<const float*>(logits.data());
  task.logits_stride = logits.stride(0);
  task.num_rows = rows;
  task.vocab_size = vocab_size;
  task.token_ids = token_ids.data();
  task.num_top = num_top;
  task.logprobs = logprobs.data();
  task.top_ids = top_ids.data();
  task.top_logprobs = top_logprobs.data();
  const SampleKernels& kernels = sample_kernels(isa);
  run_released([&] { return run_logprobs(kernels, pool, task); });
  return {std::move(logprobs), std::move(top_ids), std::move(top_logprobs)};
}

}  // namespace

void bind_sampling(nb::module_& module) {
  nb::class_<SamplingRule>(module, "SamplingRule",
                           "What a request asks of its tokens, and which it has had.\n\n"
                           "One thread at a time.")
      .def(nb::new_(&make_rule), nb::kw_only(), "temperature"_a = 1.0f, "top_k"_a = 0,
           "top_p"_a = 1.0, "min_p"_a = 0.0f, "repetition_penalty"_a = 1.0f,
           "frequency_penalty"_a = 0.0f, "presence_penalty"_a = 0.0f, "min_tokens"_a = 0,
           "prompt_ids"_a = std::vector<int64_t>(),
           "biases"_a = std::vector<std::pair<int64_t, float>>(),
           "stop_ids"_a = std::vector<int64_t>(),
           "Take a request's parameters; `prompt_ids` count for the repetition penalty, and\n"
           "`stop_ids` are not chosen before `min_tokens`. Ids outside of the vocabulary are\n"
           "passed over. Raises: ConfigError.")
      .def("note_token", &SamplingRule::note_token, "token_id"_a,
           "Count a chosen token, for the penalties.");
  module.def("sample_tokens", &sample_tokens, "logits"_a, "rules"_a, "draws"_a, "positions"_a,
             "pool"_a.none() = nb::none(), "isa"_a = "",
             "Choose a token for each row of `logits` [rows, vocabulary], float32, not modified.\n\n"
             "Args:\n"
             "    rules: one a row; no other thread may use them meanwhile.\n"
             "    draws: in [0, 1), one a row.\n"
             "    positions: of the token in its request's output, one a row.\n"
             "    pool: shares the rows where they are many; None runs them here.\n"
             "Returns: ids; -1 for a row whose logits hold NaN, or whose largest is not finite.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa).");
  module.def("gather_logprobs", &gather_logprobs, "logits"_a, "token_ids"_a, "num_top"_a = 0,
             "pool"_a.none() = nb::none(), "isa"_a = "",
             "Natural log-probabilities of each row's token and of its `num_top` likeliest.\n\n"
             "Returns: [rows]; ids [rows * num_top], best first, of equals the lower id; and\n"
             "theirs. NaN for a row without a distribution, as `sample_tokens` has it.\n"
             "Raises: ShapeError; ConfigError or UnsupportedError (isa).");
}

}  // namespace tandem::bindings
