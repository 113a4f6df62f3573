// Goal: the gated delta rule touches no memory but its own; all ISAs, chunks and numbers of threads agree bitwise.
//
// Method: exactly sized heap memory and sizes around those of registers, panels and tiles; mostly for the sanitizers.
// What the results should be is tested from Python against an oracle.
#include "kernels/recurrent/gated_delta.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/test.h"
#include "kernels/vectors/test_isas.h"
#include "kernels/vectors/test_numbers.h"

namespace tandem {
namespace {

constexpr GatedDeltaShape kShapes[] = {{1, 1, 1, 1, 1},   {1, 3, 5, 7, 4},  {2, 4, 16, 33, 2},
                                       {2, 2, 65, 32, 4}, {1, 2, 64, 64, 3},
                                       // Each item of a key decays apart.
                                       {2, 4, 16, 33, 2, 16}, {1, 2, 65, 64, 3, 65}};
constexpr size_t kNumSequences = 2;
constexpr size_t kLengths[kNumSequences] = {70, 35};

template <class T>
std::vector<T> draw(TestNumbers& numbers, size_t size) {
  std::vector<T> values(size);
  for (T& value : values) {
    const float x = numbers.uniform();
    if constexpr (sizeof(T) == 4) {
      value = x;
    } else {
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      value = static_cast<T>(bits >> 16);
    }
  }
  return values;
}

// Outputs and states of both sequences, each computed in chunks of `chunk` rows.
template <class T>
std::vector<float> run_chunks(const GatedDeltaShape& shape, Isa isa, ThreadPool* pool,
                              size_t chunk) {
  const size_t channels = num_channels_of(shape), values = shape.num_v_heads * shape.value_dim;
  TestNumbers numbers;
  const std::vector<float> conv = numbers.vector(shape.conv_width * channels);
  const size_t decays = all_decays_of(shape);
  const std::vector<float> rate(shape.num_v_heads, 0.5f), bias = numbers.vector(decays);
  const std::vector<float> norm = numbers.vector(shape.value_dim);
  std::vector<float> states(kNumSequences * state_size_of(shape));
  std::vector<T> carried(kNumSequences * (shape.conv_width - 1) * channels);
  std::vector<T> x[kNumSequences], z[kNumSequences], a[kNumSequences], b[kNumSequences];
  for (size_t s = 0; s < kNumSequences; ++s) {
    x[s] = draw<T>(numbers, kLengths[s] * channels);
    z[s] = draw<T>(numbers, kLengths[s] * values);
    a[s] = draw<T>(numbers, kLengths[s] * decays);
    b[s] = draw<T>(numbers, kLengths[s] * shape.num_v_heads);
  }
  std::vector<float> all;
  for (size_t first = 0; first < kLengths[0]; first += chunk) {
    std::vector<T> rows_x, rows_z, rows_a, rows_b;
    std::vector<int64_t> query_start = {0};
    const int64_t slots[] = {1, 0};
    for (size_t s = 0; s < kNumSequences; ++s) {
      const size_t begin = std::min(first, kLengths[s]), end = std::min(first + chunk, kLengths[s]);
      const auto append = [&](std::vector<T>& rows, const std::vector<T>& of, size_t width) {
        rows.insert(rows.end(), of.begin() + static_cast<ptrdiff_t>(begin * width),
                    of.begin() + static_cast<ptrdiff_t>(end * width));
      };
      append(rows_x, x[s], channels);
      append(rows_z, z[s], values);
      append(rows_a, a[s], decays);
      append(rows_b, b[s], shape.num_v_heads);
      query_start.push_back(query_start.back() + static_cast<int64_t>(end - begin));
    }
    std::vector<T> out(rows_z.size());
    GatedDeltaTask task;
    task.shape = shape;
    task.weights = {conv.data(), rate.data(), bias.data(), norm.data(), 1e-6f, 1.0f, true};
    task.x = rows_x.data();
    task.x_stride = channels;
    task.z = rows_z.data();
    task.z_stride = task.out_stride = values;
    task.a = rows_a.data();
    task.b = rows_b.data();
    task.a_stride = decays;
    task.b_stride = shape.num_v_heads;
    task.type = task.gate_type = sizeof(T) == 4 ? FloatType::kFloat32 : FloatType::kBfloat16;
    task.out = out.data();
    task.states = states.data();
    task.state_stride = state_size_of(shape);
    task.carried = carried.data();
    task.carried_stride = (shape.conv_width - 1) * channels;
    task.query_start = query_start.data();
    task.slots = slots;
    task.num_sequences = kNumSequences;
    CHECK(run_gated_delta(choose_recurrent_kernels(isa), pool, task).is_ok());
    // In the order of sequences, whatever the chunk.
    for (size_t s = 0; s < kNumSequences; ++s)
      for (int64_t row = query_start[s]; row < query_start[s + 1]; ++row) {
        const size_t place = (s * kLengths[0] + first + static_cast<size_t>(row - query_start[s])) * values;
        if (all.size() < place + values) all.resize(place + values);
        for (size_t i = 0; i < values; ++i)
          all[place + i] = static_cast<float>(out[static_cast<size_t>(row) * values + i]);
      }
  }
  all.insert(all.end(), states.begin(), states.end());
  for (const T value : carried) all.push_back(static_cast<float>(value));
  return all;
}

template <class T>
void compare_runs() {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const GatedDeltaShape& shape : kShapes) {
    const std::vector<float> want = run_chunks<T>(shape, Isa::kPlain, nullptr, kLengths[0]);
    for (const float value : want) CHECK(std::isfinite(value));
    for (const Isa isa : available_isas())
      for (const size_t chunk : {kLengths[0], size_t{1}, size_t{33}})
        CHECK(run_chunks<T>(shape, isa, chunk == 33 ? pool.get() : nullptr, chunk) == want);
  }
}

}  // namespace

TEST(gated_delta_runs_agree_f32) { compare_runs<float>(); }
TEST(gated_delta_runs_agree_bf16) { compare_runs<uint16_t>(); }

}  // namespace tandem
