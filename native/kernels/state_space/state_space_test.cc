// Goal: state spaces touch no memory but their own; all ISAs, chunks and numbers of threads agree bitwise.
//
// Method: exactly sized heap memory and sizes around those of registers, blocks, panels and tiles; mostly for the
// sanitizers. What the results should be is tested from Python against oracles.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/test.h"
#include "kernels/state_space/mamba2.h"
#include "kernels/state_space/short_conv.h"
#include "kernels/vectors/test_isas.h"
#include "kernels/vectors/test_numbers.h"

namespace tandem {
namespace {

constexpr Mamba2Shape kShapes[] = {{1, 1, 1, 1, 1}, {3, 7, 1, 5, 4}, {4, 33, 2, 16, 2}, {2, 64, 2, 65, 3}};
constexpr size_t kRows = 70;

// The outputs of one sequence, computed in chunks of `chunk` rows, and its state.
std::vector<float> run_chunks(const Mamba2Shape& shape, Isa isa, ThreadPool* pool, size_t chunk) {
  const size_t channels = num_channels_of(shape), values = num_values_of(shape);
  TestNumbers numbers;
  const std::vector<float> conv = numbers.vector(shape.conv_width * channels);
  const std::vector<float> conv_bias = numbers.vector(channels), norm = numbers.vector(values);
  const std::vector<float> rate(shape.num_heads, 0.5f), bias = numbers.vector(shape.num_heads);
  const std::vector<float> x = numbers.vector(kRows * channels), z = numbers.vector(kRows * values);
  const std::vector<float> dt = numbers.vector(kRows * shape.num_heads);
  std::vector<float> states(state_size_of(shape)), carried((shape.conv_width - 1) * channels);
  std::vector<float> out(kRows * values), mixed(kRows * values);
  for (size_t first = 0; first < kRows; first += chunk) {
    const int64_t query_start[] = {0, static_cast<int64_t>(std::min(chunk, kRows - first))};
    const int64_t slots[] = {0};
    Mamba2Task task;
    task.shape = shape;
    task.weights = {conv.data(), conv_bias.data(), rate.data(), bias.data(), bias.data(),
                    norm.data(), 1e-5f, 0.1f, 2.0f};
    task.x = x.data() + first * channels;
    task.x_stride = channels;
    task.z = z.data() + first * values;
    task.z_stride = task.out_stride = values;
    task.dt = dt.data() + first * shape.num_heads;
    task.dt_stride = shape.num_heads;
    task.out = out.data() + first * values;
    task.mixed = mixed.data() + first * values;
    task.states = states.data();
    task.state_stride = states.size();
    task.carried = carried.data();
    task.carried_stride = carried.size();
    task.query_start = query_start;
    task.slots = slots;
    task.num_sequences = 1;
    CHECK(run_mamba2(choose_state_space_kernels(isa), pool, task).is_ok());
  }
  out.insert(out.end(), states.begin(), states.end());
  out.insert(out.end(), carried.begin(), carried.end());
  return out;
}

std::vector<float> run_conv_chunks(size_t channels, size_t width, Isa isa, ThreadPool* pool,
                                   size_t chunk) {
  TestNumbers numbers;
  const std::vector<float> conv = numbers.vector(width * channels), bias = numbers.vector(channels);
  const std::vector<float> x = numbers.vector(kRows * 3 * channels);
  std::vector<float> carried((width - 1) * channels), out(kRows * channels);
  for (size_t first = 0; first < kRows; first += chunk) {
    const int64_t query_start[] = {0, static_cast<int64_t>(std::min(chunk, kRows - first))};
    const int64_t slots[] = {0};
    ShortConvTask task;
    task.num_channels = channels;
    task.conv_width = width;
    task.conv = conv.data();
    task.bias = bias.data();
    task.x = x.data() + first * 3 * channels;
    task.x_stride = 3 * channels;
    task.out = out.data() + first * channels;
    task.out_stride = channels;
    task.carried = carried.data();
    task.carried_stride = carried.size();
    task.query_start = query_start;
    task.slots = slots;
    task.num_sequences = 1;
    CHECK(run_short_conv(choose_state_space_kernels(isa), pool, task).is_ok());
  }
  out.insert(out.end(), carried.begin(), carried.end());
  return out;
}

}  // namespace

TEST(mamba2_runs_agree) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const Mamba2Shape& shape : kShapes) {
    const std::vector<float> want = run_chunks(shape, Isa::kPlain, nullptr, kRows);
    for (const float value : want) CHECK(std::isfinite(value));
    for (const Isa isa : available_isas())
      for (const size_t chunk : {kRows, size_t{1}, size_t{33}})
        CHECK(run_chunks(shape, isa, chunk == 33 ? pool.get() : nullptr, chunk) == want);
  }
}

TEST(short_conv_runs_agree) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const size_t channels : {size_t{1}, size_t{7}, size_t{64}, size_t{131}})
    for (const size_t width : {size_t{1}, size_t{3}, size_t{16}}) {
      const std::vector<float> want = run_conv_chunks(channels, width, Isa::kPlain, nullptr, kRows);
      for (const Isa isa : available_isas())
        for (const size_t chunk : {kRows, size_t{1}, size_t{33}})
          CHECK(run_conv_chunks(channels, width, isa, chunk == 33 ? pool.get() : nullptr, chunk) ==
                want);
    }
}

}  // namespace tandem
