#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels/built_isas.h"

namespace tandem {

extern const SampleKernels kSamplePlain;
#if defined(__x86_64__)
extern const SampleKernels kSampleAvx2;
extern const SampleKernels kSampleAvx512Bw;
#endif

namespace {

// Number of logits that one thread processes in some microseconds, and for which another thread is
// worth waking.
constexpr size_t kChunkLogits = 64 * 1024;

// Number of likeliest tokens that are ordered at first, and the factor by which the number grows if
// top_k, top_p or min_p keep more.
constexpr size_t kFirstCandidates = 32;
constexpr size_t kGrowth = 8;

// Number of keys above which sorting by digits is faster than sorting by comparison.
constexpr size_t kMaxComparedKeys = 2048;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scratch memory of the calling thread, kept at the size of the largest row so far.
struct Scratch {
  std::vector<float> edited, block_tops, ordered_tops, values, weights;
  std::vector<double> cumulated;
  std::vector<uint64_t> keys, other_keys;
};

Scratch& own_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

size_t count_blocks(size_t size) { return (size + kSampleBlock - 1) / kSampleBlock; }

// Returns a key of a token by which tokens sort from the largest logit to the smallest, and equal
// ones by ascending id.
uint64_t make_key(float logit, size_t id) {
  uint32_t bits;
  const float unsigned_zero = logit + 0.0f;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}
size_t key_id(uint64_t key) { return static_cast<uint32_t>(key); }

// Sorts keys by the logit alone: ids ascend already, and sorting by digits keeps the order of equal
// logits.
void sort_by_digits(std::vector<uint64_t>& keys, std::vector<uint64_t>& other) {
  constexpr int kDigitBits = 11;
  constexpr size_t kDigits = size_t{1} << kDigitBits;
  other.resize(keys.size());
  for (int shift = 32; shift < 64; shift += kDigitBits) {
    std::array<size_t, kDigits> places{};
    for (const uint64_t key : keys) ++places[key >> shift & (kDigits - 1)];
    size_t place = 0;
    for (size_t& entry : places) {
      const size_t count = entry;
      entry = place;
      place += count;
    }
    for (const uint64_t key : keys) other[places[key >> shift & (kDigits - 1)]++] = key;
    keys.swap(other);
  }
}

// A row of logits with the results of its scan; it refers to scratch memory.
struct Row {
  const float* logits;
  size_t size;
  RowScan found;

  bool is_broken() const { return found.has_nan || std::isinf(found.top); }
};

Row scan_row(const SampleKernels& kernels, Scratch& scratch, const float* logits, size_t size) {
  scratch.block_tops.resize(count_blocks(size));
  return {logits, size, kernels.scan(logits, size, scratch.block_tops.data())};
}

double sum_row(const SampleKernels& kernels, Scratch& scratch, const Row& row, float inverse) {
  scratch.cumulated.resize(count_blocks(row.size));
  return kernels.sum(row.logits, row.size, row.found.top, inverse, scratch.cumulated.data());
}

// Sorts the keys of at least the `wanted` largest logits, including all that equal the last of
// them; returns true if these are all tokens. The `wanted`-th largest of the blocks' largest logits
// is a bound that at least `wanted` logits reach, so only blocks that reach it are searched.
bool order_largest(Scratch& scratch, const Row& row, size_t wanted) {
  const std::vector<float>& tops = scratch.block_tops;
  float bound = -kInfinity;
  if (wanted < tops.size()) {
    scratch.ordered_tops = tops;
    const auto nth = scratch.ordered_tops.begin() + static_cast<ptrdiff_t>(wanted) - 1;
    std::nth_element(scratch.ordered_tops.begin(), nth, scratch.ordered_tops.end(),
                     std::greater<float>());
    bound = *nth;
  }
  scratch.keys.clear();
  for (size_t block = 0; block < tops.size(); ++block) {
    if (tops[block] < bound) continue;
    const size_t end = std::min(row.size, (block + 1) * kSampleBlock);
    for (size_t i = block * kSampleBlock; i < end; ++i)
      if (row.logits[i] >= bound) scratch.keys.push_back(make_key(row.logits[i], i));
  }
  if (scratch.keys.size() > kMaxComparedKeys)
    sort_by_digits(scratch.keys, scratch.other_keys);
  else
    std::sort(scratch.keys.begin(), scratch.keys.end());
  return scratch.keys.size() == row.size;
}

// Computes the weights (unnormalised probabilities) of the ordered tokens.
void weigh_ordered(const SampleKernels& kernels, Scratch& scratch, const Row& row, float inverse) {
  const size_t count = scratch.keys.size();
  scratch.values.resize(count);
  scratch.weights.resize(count);
  for (size_t i = 0; i < count; ++i) scratch.values[i] = row.logits[key_id(scratch.keys[i])];
  kernels.weigh(scratch.values.data(), count, row.found.top, inverse, scratch.weights.data());
}

// Returns the first index at which the sum of weights, starting from `mass`, exceeds `target`; if
// rounding leaves none, the last index with a positive weight.
size_t walk_to(const float* weights, size_t count, double mass, double target) {
  size_t last = 0;
  for (size_t i = 0; i < count; ++i) {
    mass += static_cast<double>(weights[i]);
    if (mass > target) return i;
    if (weights[i] > 0.0f) last = i;
  }
  return last;
}

size_t find_largest(const Scratch& scratch, const Row& row) {
  size_t i = 0;
  while (scratch.block_tops[i] != row.found.top) ++i;
  i *= kSampleBlock;
  while (row.logits[i] != row.found.top) ++i;
  return i;
}

size_t draw_from_all(const SampleKernels& kernels, Scratch& scratch, const Row& row, float inverse,
                     double draw) {
  const double total = sum_row(kernels, scratch, row, inverse);
  const std::vector<double>& cumulated = scratch.cumulated;
  const double target = draw * total;
  auto found = std::upper_bound(cumulated.begin(), cumulated.end(), target);
  // For a draw close to 1, `target` may round to the total, which no sum exceeds: take the first
  // block whose sum reaches the total.
  if (found == cumulated.end()) found = std::lower_bound(cumulated.begin(), cumulated.end(), total);
  const size_t block = static_cast<size_t>(found - cumulated.begin());
  const size_t begin = block * kSampleBlock;
  float weights[kSampleBlock];
  const size_t count = std::min(kSampleBlock, row.size - begin);
  kernels.weigh(row.logits + begin, count, row.found.top, inverse, weights);
  return begin + walk_to(weights, count, block == 0 ? 0.0 : cumulated[block - 1], target);
}

// Number of the ordered weights that a cut keeps, and their sum.
struct Cut {
  size_t count = 0;
  double mass = 0.0;
  bool is_found = true;  // Whether no weight beyond the last could be kept.
};

Cut cut_by_rank(const std::vector<float>& weights, size_t max_count, float min_weight) {
  Cut cut;
  for (; cut.count < weights.size(); ++cut.count) {
    if (cut.count == max_count || weights[cut.count] < min_weight) return cut;
    cut.mass += static_cast<double>(weights[cut.count]);
  }
  cut.is_found = cut.count == max_count;
  return cut;
}

// Keeps weights, of the first `count`, until their sum reaches `limit` (top_p); the first is always
// kept.
Cut cut_by_mass(const std::vector<float>& weights, size_t count, double limit) {
  Cut cut;
  for (; cut.count < count; ++cut.count) {
    if (cut.count > 0 && cut.mass >= limit) return cut;
    cut.mass += static_cast<double>(weights[cut.count]);
  }
  cut.is_found = false;
  return cut;
}

size_t draw_from_largest(const SampleKernels& kernels, Scratch& scratch, const Row& row,
                         float inverse, const SamplingRule& rule, double draw) {
  const bool is_ranked = rule.top_k != 0 || rule.min_p > 0.0f;
  const size_t max_count = rule.top_k != 0 ? std::min(rule.top_k, row.size) : row.size;
  const double total = is_ranked ? 0.0 : sum_row(kernels, scratch, row, inverse);
  for (size_t wanted = rule.top_k != 0 ? max_count : kFirstCandidates;; wanted *= kGrowth) {
    const bool has_all = order_largest(scratch, row, wanted);
    weigh_ordered(kernels, scratch, row, inverse);
    Cut cut;
    if (is_ranked) {
      cut = cut_by_rank(scratch.weights, max_count, rule.min_p);
      if (!cut.is_found && !has_all) continue;
      if (rule.top_p < 1.0) cut = cut_by_mass(scratch.weights, cut.count, rule.top_p * cut.mass);
    } else {
      cut = cut_by_mass(scratch.weights, scratch.weights.size(), rule.top_p * total);
      if (!cut.is_found && !has_all) continue;
    }
    const size_t place = walk_to(scratch.weights.data(), cut.count, 0.0, draw * cut.mass);
    return key_id(scratch.keys[place]);
  }
}

int64_t sample_row(const SampleKernels& kernels, const SampleTask& task, size_t index) {
  Scratch& scratch = own_scratch();
  const SamplingRule& rule = *task.rules[index];
  const float* logits = task.logits + index * task.logits_stride;
  if (rule.edits_at(task.positions[index])) {
    scratch.edited.assign(logits, logits + task.vocab_size);
    rule.edit(scratch.edited.data(), task.vocab_size, task.positions[index]);
    logits = scratch.edited.data();
  }
  const Row row = scan_row(kernels, scratch, logits, task.vocab_size);
  if (row.is_broken()) return kBrokenRow;
  if (rule.temperature == 0.0f) return static_cast<int64_t>(find_largest(scratch, row));
  // Limit the inverse to finite values, so that 0, the difference of the largest logit from itself,
  // stays 0 at any temperature.
  const float inverse = std::min(1.0f / rule.temperature, FLT_MAX);
  const double draw = task.draws[index];
  const bool is_cut = rule.top_k != 0 || rule.min_p > 0.0f || rule.top_p < 1.0;
  const size_t token = is_cut ? draw_from_largest(kernels, scratch, row, inverse, rule, draw)
                              : draw_from_all(kernels, scratch, row, inverse, draw);
  return static_cast<int64_t>(token);
}

void write_logprobs(const SampleKernels& kernels, const LogprobTask& task, size_t index) {
  Scratch& scratch = own_scratch();
  const float* logits = task.logits + index * task.logits_stride;
  int64_t* top_ids = task.top_ids + index * task.num_top;
  double* top_logprobs = task.top_logprobs + index * task.num_top;
  const Row row = scan_row(kernels, scratch, logits, task.vocab_size);
  if (row.is_broken()) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    task.logprobs[index] = kNan;
    for (size_t i = 0; i < task.num_top; ++i) top_ids[i] = static_cast<int64_t>(i);
    std::fill_n(top_logprobs, task.num_top, kNan);
    return;
  }
  const double log_sum = std::log(sum_row(kernels, scratch, row, 1.0f));
  const auto logprob = [&](size_t id) {
    return (static_cast<double>(logits[id]) - static_cast<double>(row.found.top)) - log_sum;
  };
  task.logprobs[index] = logprob(static_cast<size_t>(task.token_ids[index]));
  if (task.num_top == 0) return;
  order_largest(scratch, row, task.num_top);
  for (size_t i = 0; i < task.num_top; ++i) {
    const size_t id = key_id(scratch.keys[i]);
    top_ids[i] = static_cast<int64_t>(id);
    top_logprobs[i] = logprob(id);
  }
}

template <class Run>
Status run_rows(ThreadPool* pool, size_t num_rows, size_t vocab_size, const Run& run) {
  const size_t chunk = kChunkLogits / (vocab_size + 1) + 1;
  if (pool == nullptr || num_rows < 2 * chunk) {
    for (size_t row = 0; row < num_rows; ++row) run(row);
    return {};
  }
  return pool->parallel_for(num_rows, chunk, [&](size_t begin, size_t end, int) {
    for (size_t row = begin; row < end; ++row) run(row);
  });
}

}  // namespace

void SamplingRule::note_token(int64_t token_id) {
  if (!has_penalties()) return;
  if (++counts[token_id] == 1 && repetition_penalty != 1.0f &&
      std::find(seen_ids.begin(), seen_ids.end(), token_id) == seen_ids.end())
    seen_ids.push_back(token_id);
}

void SamplingRule::edit(float* logits, size_t vocab_size, size_t position) const {
  const auto is_known = [&](int64_t id) { return id >= 0 && static_cast<size_t>(id) < vocab_size; };
  for (const int64_t id : seen_ids) {
    if (!is_known(id)) continue;
    float& logit = logits[id];
    logit = logit > 0.0f ? logit / repetition_penalty : logit * repetition_penalty;
  }
  if (frequency_penalty != 0.0f || presence_penalty != 0.0f)
    for (const auto& [id, count] : counts)
      if (is_known(id))
        logits[id] -= static_cast<float>(count) * frequency_penalty + presence_penalty;
  for (const auto& [id, bias] : biases)
    if (is_known(id)) logits[id] += bias;
  if (position < min_tokens)
    for (const int64_t id : stop_ids)
      if (is_known(id)) logits[id] = -kInfinity;
}

const SampleKernels& choose_sample_kernels(Isa isa) {
#ifdef TANDEM_BUILT_SAMPLING_AVX512_BW
  if (isa >= Isa::kAvx512Bw) return kSampleAvx512Bw;
#endif
#ifdef TANDEM_BUILT_SAMPLING_AVX2
  if (isa >= Isa::kAvx2) return kSampleAvx2;
#endif
  static_cast<void>(isa);
  return kSamplePlain;
}

Status run_sample(const SampleKernels& kernels, ThreadPool* pool, const SampleTask& task) {
  return run_rows(pool, task.num_rows, task.vocab_size,
                  [&](size_t row) { task.token_ids[row] = sample_row(kernels, task, row); });
}

Status run_logprobs(const SampleKernels& kernels, ThreadPool* pool, const LogprobTask& task) {
  return run_rows(pool, task.num_rows, task.vocab_size,
                  [&](size_t row) { write_logprobs(kernels, task, row); });
}

}  // namespace tandem
