// Goal: the linear kernel touches no memory but its own, and all ISAs of this machine agree.
//
// Method: as experts_test.cc, with sizes that end inside panels, blocks and groups, into outputs of
// exactly their size.
#include "kernels/linear.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/test.h"
#include "base/topology.h"
#include "kernels/test_numbers.h"

namespace tandem {
namespace {

struct LinearShape {
  size_t in_features, out_features, num_rows;
};

std::vector<float> run(ThreadPool& pool, const WeightFormat& format, const LinearShape& shape,
                       Isa isa) {
  PackedMatrix::Config config;
  config.format = format;
  config.in_features = shape.in_features;
  config.out_features = shape.out_features;
  config.isa = isa_name(isa);
  PackedMatrix matrix = std::move(PackedMatrix::create(config).value());
  TestNumbers numbers;
  const std::vector<float> weights = numbers.vector(shape.in_features * shape.out_features);
  const std::vector<float> bias = numbers.vector(shape.out_features);
  const std::vector<float> x = numbers.vector(shape.num_rows * shape.in_features);
  CHECK(matrix.pack(pool, 0, {weights.data(), false, shape.out_features, shape.in_features})
            .is_ok());
  matrix.set_bias(bias.data());
  std::vector<float> out(shape.num_rows * shape.out_features, 99.0f);
  PackedMatrix::Batch batch;
  batch.x = x.data();
  batch.num_rows = shape.num_rows;
  batch.out = out.data();
  CHECK(matrix.forward(pool, batch).is_ok());
  std::vector<uint16_t> narrow(out.size());
  batch.out = narrow.data();
  batch.is_out_bf16 = true;
  CHECK(matrix.forward(pool, batch).is_ok());
  return out;
}

void compare_isas(const WeightFormat& format, const LinearShape& shape) {
  const std::unique_ptr<ThreadPool> pool =
      std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 2)).value());
  const std::vector<float> want = run(*pool, format, shape, Isa::kPlain);
  float largest = 0;
  for (const float value : want) largest = std::max(largest, std::fabs(value));
  const float tolerance = has_codes(format) ? 0.0f : 0.02f * largest;
  for (const Isa isa : available_isas()) {
    const std::vector<float> got = run(*pool, format, shape, isa);
    for (size_t i = 0; i < want.size(); ++i) CHECK(std::fabs(got[i] - want[i]) <= tolerance);
  }
}

}  // namespace

TEST(linear_isas_agree_ints) {
  compare_isas({8, 32, false}, {96, 160, 9});
  compare_isas({8, 0, false}, {77, 130, 7});
  compare_isas({8, 128, true}, {128, 65, 201});
  compare_isas({4, 32, true}, {96, 1, 5});
  compare_isas({4, 64, false}, {64, 200, 1});
}

TEST(linear_isas_agree_floats) {
  compare_isas({16, 0, false}, {77, 35, 9});
  compare_isas({16, 0, false, true}, {1, 1, 50});
  compare_isas({8, 128, false, true}, {77, 130, 7});
  compare_isas({8, 128, false, true}, {300, 300, 3});
  compare_isas({4, 32, false, true}, {50, 66, 7});
}

TEST(linear_rows_are_packed_in_blocks) {
  const std::unique_ptr<ThreadPool> pool =
      std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 2)).value());
  PackedMatrix::Config config;
  config.format = {8, 32, false};
  config.in_features = 32;
  config.out_features = 300;
  PackedMatrix matrix = std::move(PackedMatrix::create(config).value());
  const std::vector<float> weights(300 * 32, 1.0f);
  const auto pack = [&](size_t first_row, size_t rows) {
    return matrix.pack(*pool, first_row, {weights.data(), false, rows, 32}).is_ok();
  };
  CHECK(pack(0, 128));
  CHECK(pack(128, 172));
  CHECK(!pack(64, 128));
  CHECK(!pack(0, 100));
  CHECK(!pack(256, 128));
  CHECK(!pack(static_cast<size_t>(-128), 128));
}

}  // namespace tandem
