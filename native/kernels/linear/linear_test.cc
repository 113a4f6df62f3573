// Goal: the linear kernel touches no memory but its own, and all ISAs of this machine agree.
//
// Method: as experts_test.cc, with sizes that end inside panels, blocks and groups, into outputs of
// exactly their size.
#include "kernels/linear/linear.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/test.h"
#include "base/machine/topology.h"
#include "kernels/vectors/test_isas.h"
#include "kernels/vectors/test_numbers.h"

namespace tandem {
namespace {

struct LinearShape {
  size_t in_features, out_features, num_rows;
};

std::vector<float> run(ThreadPool& pool, const WeightFormat& format, const LinearShape& shape,
                       Isa isa, std::vector<int> share_nodes = {}) {
  PackedMatrix::Config config;
  config.share_nodes = std::move(share_nodes);
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
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  check_isas_agree(format, [&](Isa isa) { return run(*pool, format, shape, isa); });
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
  compare_isas({32, 0, false, true}, {77, 35, 9});
  compare_isas({32, 0, false, true}, {300, 130, 50});
  compare_isas({16, 0, false}, {77, 35, 9});
  compare_isas({16, 0, false, true}, {1, 1, 50});
  compare_isas({8, 128, false, true}, {77, 130, 7});
  compare_isas({8, 128, false, true}, {300, 300, 3});
  compare_isas({4, 32, false, true}, {50, 66, 7});
}

// Logical nodes on the CPUs of the real ones; where the pages lie does not matter to a result.
TEST(linear_outputs_do_not_depend_on_the_nodes) {
  const Topology topology = read_topology();
  const int node_id = topology.numa_nodes.front().node_id;
  const WeightFormat format{8, 32, false};
  // Panels: fewer than shares, as many, uneven ones; rows: one, some, more than one task's.
  for (const size_t out_features : {size_t{40}, size_t{192}, size_t{645}}) {
    for (const size_t num_rows : {size_t{1}, size_t{9}, size_t{400}}) {
      const LinearShape shape{64, out_features, num_rows};
      std::vector<float> want;
      for (const size_t num_nodes : {1, 2, 3}) {
        ThreadPool::Options options;
        for (size_t n = 0; n < num_nodes; ++n)
          options.nodes.push_back({static_cast<int>(n), 2, topology.allowed_cpus});
        const std::unique_ptr<ThreadPool> pool = std::move(ThreadPool::create(options).value());
        for (const size_t num_shares : {0, 1, 2, 3, 5}) {
          const std::vector<float> got =
              run(*pool, format, shape, available_isas().back(),
                  std::vector<int>(num_shares, node_id));
          if (want.empty()) want = got;
          CHECK(got == want);
        }
      }
    }
  }
}

TEST(linear_shares_lie_where_they_should) {
  const Topology topology = read_topology();
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  std::vector<int> nodes;
  for (int i = 0; i < 3; ++i)
    nodes.push_back(topology.numa_nodes[static_cast<size_t>(i) % topology.numa_nodes.size()].node_id);
  // Ordinary pages, and huge ones.
  for (const size_t out_features : {size_t{3000}, size_t{12000}}) {
    PackedMatrix::Config config;
    config.format = {8, 32, false};
    config.in_features = 2048;
    config.out_features = out_features;
    config.share_nodes = nodes;
    PackedMatrix matrix = std::move(PackedMatrix::create(config).value());
    const std::vector<float> weights(out_features * 2048, 1.0f);
    CHECK(matrix.pack(*pool, 0, {weights.data(), false, out_features, 2048}).is_ok());
    Result<std::vector<int>> found = matrix.find_share_nodes();
    // Both calls may be refused, as containers do.
    if (matrix.is_bound() && found.is_ok()) CHECK(found.value() == nodes);
  }
  PackedMatrix::Config config;
  config.format = {8, 32, false};
  config.in_features = config.out_features = 32;
  config.share_nodes = {4096};
  CHECK(PackedMatrix::create(config).error().code == Code::kNotFound);
}

TEST(linear_rows_are_packed_in_blocks) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
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
