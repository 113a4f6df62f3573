// Goal: the expert kernels touch no memory but theirs, and all ISAs of this machine agree.
//
// Method: random weights through every format, shape and number of rows, mostly for the sanitizers;
// integer formats must agree bitwise with the plain variant, bf16 to within its rounding. What the
// results should be is tested from Python against an oracle.
#include "kernels/experts/experts.h"

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

struct Shape {
  size_t num_experts, hidden_size, intermediate_size, num_tokens, top_k;
};

std::vector<float> run(ThreadPool& pool, const WeightFormat& format, const Shape& shape, Isa isa,
                       size_t num_parts = 1, bool has_gradients = false) {
  ExpertBank::Config config;
  config.num_parts = num_parts;
  config.format = format;
  config.num_experts = shape.num_experts;
  config.hidden_size = shape.hidden_size;
  config.intermediate_size = shape.intermediate_size;
  config.isa = isa_name(isa);
  Result<ExpertBank> made = ExpertBank::create(config);
  CHECK(made.is_ok());
  ExpertBank bank = std::move(made.value());
  TestNumbers numbers;
  const size_t size = shape.hidden_size * shape.intermediate_size;
  for (size_t e = 0; e < shape.num_experts; ++e) {
    const std::vector<float> gate = numbers.vector(size), up = numbers.vector(size);
    const std::vector<float> down = numbers.vector(size);
    const MatrixView gate_view{gate.data(), false, shape.intermediate_size, shape.hidden_size};
    const MatrixView up_view{up.data(), false, shape.intermediate_size, shape.hidden_size};
    const MatrixView down_view{down.data(), false, shape.hidden_size, shape.intermediate_size};
    CHECK(bank.pack(pool, e, gate_view, up_view, down_view).is_ok());
  }
  const std::vector<float> x = numbers.vector(shape.num_tokens * shape.hidden_size);
  const std::vector<float> weights = numbers.vector(shape.num_tokens * shape.top_k);
  std::vector<int32_t> ids(shape.num_tokens * shape.top_k);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(i * 7 % (shape.num_experts + 1)) - 1;
  // Exactly sized, so that a write beyond it is seen.
  std::vector<float> out(shape.num_tokens * shape.hidden_size, 99.0f);
  ExpertBank::Batch batch;
  batch.x = x.data();
  batch.num_tokens = shape.num_tokens;
  batch.expert_ids = ids.data();
  batch.top_k = shape.top_k;
  batch.weights = weights.data();
  batch.out = out.data();
  CHECK(bank.forward(pool, batch).is_ok());
  if (!has_gradients) return out;
  std::vector<float> d_x(out.size(), 99.0f), d_weights(weights.size(), 99.0f);
  ExpertBank::GradBatch gradients;
  gradients.x = x.data();
  gradients.num_tokens = shape.num_tokens;
  gradients.expert_ids = ids.data();
  gradients.top_k = shape.top_k;
  gradients.weights = weights.data();
  gradients.d_out = out.data();
  gradients.d_x = d_x.data();
  gradients.d_weights = d_weights.data();
  CHECK(bank.backward(pool, gradients).is_ok());
  out.insert(out.end(), d_x.begin(), d_x.end());
  out.insert(out.end(), d_weights.begin(), d_weights.end());
  return out;
}

void compare_isas(const WeightFormat& format, const Shape& shape) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  check_isas_agree(format, [&](Isa isa) { return run(*pool, format, shape, isa); });
}

}  // namespace

TEST(experts_isas_agree_int8) {
  compare_isas({8, 32, false}, {3, 96, 160, 9, 2});
  compare_isas({8, 128, false}, {2, 128, 128, 53, 1});
  compare_isas({8, 16, true}, {2, 48, 16, 5, 2});
}

TEST(experts_isas_agree_int4) {
  compare_isas({4, 32, true}, {3, 96, 160, 9, 2});
  compare_isas({4, 128, false}, {2, 128, 128, 53, 1});
}

TEST(experts_isas_agree_values) {
  compare_isas({32, 0, false, true}, {3, 77, 35, 9, 2});
  compare_isas({16, 0, false}, {3, 77, 35, 9, 2});
  compare_isas({16, 0, false}, {2, 1, 1, 50, 1});
}

TEST(experts_isas_agree_floats_and_rows) {
  compare_isas({8, 128, false, true}, {2, 200, 150, 9, 2});
  compare_isas({4, 32, false, true}, {3, 77, 35, 9, 2});
  compare_isas({8, 0, false}, {2, 77, 150, 9, 2});
}

TEST(experts_parts_do_not_depend_on_the_nodes) {
  const Topology topology = read_topology();
  std::vector<std::vector<float>> results;
  for (const int num_nodes : {1, 2, 3}) {
    ThreadPool::Options options;
    for (int n = 0; n < num_nodes; ++n) options.nodes.push_back({n, 2, topology.allowed_cpus});
    const std::unique_ptr<ThreadPool> pool = std::move(ThreadPool::create(options).value());
    for (const size_t num_parts : {2, 5}) {
      results.push_back(run(*pool, {8, 32, false}, {3, 96, 352, 9, 2}, available_isas().back(),
                            num_parts, true));
    }
  }
  for (size_t i = 2; i < results.size(); ++i) CHECK(results[i] == results[i % 2]);
  CHECK(results[0] != results[1]);
}

TEST(experts_gradients_stay_within_their_memory) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  for (const Isa isa : available_isas()) {
    run(*pool, {32, 0, false, true}, {3, 77, 35, 9, 2}, isa, 1, true);
    run(*pool, {16, 0, false}, {3, 77, 35, 9, 2}, isa, 1, true);
    run(*pool, {16, 0, false}, {2, 1, 1, 50, 1}, isa, 1, true);
    run(*pool, {8, 16, true}, {2, 48, 16, 5, 2}, isa, 1, true);
    run(*pool, {4, 32, true}, {3, 96, 160, 9, 2}, isa, 1, true);
    run(*pool, {8, 128, false, true}, {2, 200, 150, 9, 2}, isa, 1, true);
    run(*pool, {4, 32, false, true}, {3, 77, 35, 9, 2}, isa, 1, true);
    run(*pool, {8, 0, false}, {2, 77, 150, 9, 2}, isa, 1, true);
  }
}

TEST(experts_refuse_ids_before_writing) {
  const std::unique_ptr<ThreadPool> pool = make_test_pool();
  ExpertBank::Config config;
  config.format = {8, 32, false};
  config.num_experts = 2;
  config.hidden_size = config.intermediate_size = 32;
  ExpertBank bank = std::move(ExpertBank::create(config).value());
  const std::vector<float> x(32, 1.0f), weights(1, 1.0f);
  std::vector<float> out(32, 5.0f);
  for (const int32_t id : {2, -2, 1 << 30}) {
    ExpertBank::Batch batch{x.data(), false, 1, &id, false, 1, weights.data(), out.data()};
    const Status status = bank.forward(*pool, batch);
    CHECK(!status.is_ok());
    CHECK_EQ(code_name(status.error().code), "shape");
    CHECK_EQ(out[7], 5.0f);
  }
}

TEST(experts_formats_are_checked) {
  CHECK(check_format({32, 0, false, true}).is_ok());
  CHECK(check_format({16, 0, false}).is_ok());
  CHECK(check_format({8, 16, true}).is_ok());
  CHECK(check_format({8, 0, false}).is_ok());
  CHECK(check_format({8, 128, false, true}).is_ok());
  CHECK(check_format({4, 32, false, true}).is_ok());
  CHECK(!check_format({8, 0, true}).is_ok());
  CHECK(!check_format({8, 64, false, true}).is_ok());
  CHECK(!check_format({4, 32, true, true}).is_ok());
  CHECK(!check_format({4, 16, true}).is_ok());
  CHECK(!check_format({8, 256, false}).is_ok());
  CHECK(!check_format({16, 32, false}).is_ok());
  CHECK(!check_size({8, 128, false}, 192, "hidden_size").is_ok());
  CHECK(!check_size({16, 0, false}, 0, "hidden_size").is_ok());
  CHECK(!check_size({8, 0, false}, 65537, "hidden_size").is_ok());
}

}  // namespace tandem
