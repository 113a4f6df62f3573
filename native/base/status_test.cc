#include "base/status.h"

#include <memory>

#include "base/test.h"

namespace tandem {
namespace {

TEST(status_is_ok_until_it_holds_an_error) {
  Status status;
  CHECK(status.is_ok());
  status = Status(Code::kCapacity, "pool.submit", "full", "threads");
  CHECK(!status.is_ok());
  CHECK_EQ(status.error().message(), "[pool.submit] full");
  CHECK_EQ(status.error().field, "threads");
  CHECK_EQ(code_name(status.error().code), "capacity");
}

TEST(result_moves_its_value_out) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(7);
  CHECK(result.is_ok());
  CHECK_EQ(*std::move(result.value()), 7);
}

TEST(every_code_has_a_name_of_its_own) {
  CHECK_EQ(static_cast<size_t>(Code::kInternal) + 1, kCodeNames.size());
  for (size_t i = 0; i < kCodeNames.size(); ++i)
    for (size_t j = 0; j < i; ++j) CHECK(kCodeNames[i] != kCodeNames[j]);
}

TEST(describe_errno_names_the_call_and_the_number) {
  CHECK_EQ(describe_errno("mmap", 12), "mmap failed: Cannot allocate memory (errno 12)");
}

}  // namespace
}  // namespace tandem
