// Common parts of the tests of packed kernels: a small thread pool, and the comparison between
// instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/threads/function_ref.h"
#include "base/test.h"
#include "base/threads/thread_pool.h"
#include "base/machine/topology.h"
#include "kernels/vectors/isa.h"
#include "kernels/weights/packing.h"
#include "kernels/weights/weight_format.h"

namespace tandem {

inline std::unique_ptr<ThreadPool> make_test_pool() {
  return std::move(ThreadPool::create(ThreadPool::plan(read_topology(), 2)).value());
}

// Checks that instruction sets agree: for integer formats and fp32 bitwise with the plain variant,
// for others to within bf16's rounding.
inline void check_isas_agree(const WeightFormat& format,
                             FunctionRef<std::vector<float>(Isa)> run) {
  const std::vector<float> want = run(Isa::kPlain);
  float largest = 0;
  for (const float value : want) largest = std::max(largest, std::fabs(value));
  const bool is_exact = has_codes(format) || format.bits == 32;
  const float tolerance = is_exact ? 0.0f : 0.02f * largest;
  std::vector<Isa> isas = available_isas();
  isas.push_back(Isa::kAmxEmulated);
  for (const Isa isa : isas) {
    const std::vector<float> got = run(isa);
    for (size_t i = 0; i < want.size(); ++i) CHECK(std::fabs(got[i] - want[i]) <= tolerance);
  }
}

}  // namespace tandem
