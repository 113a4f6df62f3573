// Goal: polls are as long as pays, and no longer. Method: polls so short that a busy machine lets some
// be, and another attempt where one was interrupted.
#include "transfer/adaptive_spin.h"

#include <chrono>
#include <thread>

#include "base/test.h"

namespace tandem::transfer {
namespace {

constexpr int64_t kLimitNs = 1'000'000;
constexpr int kAttempts = 2'000;

bool never() { return false; }

// Polls in vain; then what was polled for comes, `after_ns` later. The reach of the next poll.
int64_t give_up(AdaptiveSpin& spin, int64_t after_ns) {
  CHECK(!spin.wait(never));
  std::this_thread::sleep_for(std::chrono::nanoseconds(after_ns));
  spin.came();
  return spin.reach_ns();
}

TEST(adaptive_spin_polls_longer_where_that_would_have_paid) {
  int64_t reach = 0;
  for (int i = 0; i < kAttempts && reach != 3 * kLimitNs; ++i) {
    AdaptiveSpin spin(kLimitNs);
    CHECK_EQ(spin.reach_ns(), kLimitNs);
    reach = give_up(spin, 0);
  }
  CHECK_EQ(reach, 3 * kLimitNs);
}

TEST(adaptive_spin_polls_no_longer_for_what_comes_late) {
  AdaptiveSpin spin(1'000'000);
  CHECK_EQ(give_up(spin, 3'000'000), spin.limit_ns());
}

TEST(adaptive_spin_goes_back_when_the_longer_poll_was_in_vain) {
  for (int i = 0; i < kAttempts; ++i) {
    AdaptiveSpin spin(kLimitNs);
    if (give_up(spin, 0) != 3 * kLimitNs) continue;
    const int64_t begin = now_ns();
    CHECK(!spin.wait(never));
    if (now_ns() - begin < 3 * kLimitNs) continue;  // Interrupted, now or before.
    spin.came();
    CHECK_EQ(spin.reach_ns(), kLimitNs);
    return;
  }
  CHECK(false);
}

TEST(adaptive_spin_keeps_its_reach_while_polls_succeed) {
  int64_t reach = 0;
  for (int i = 0; i < kAttempts && reach != 3 * kLimitNs; ++i) {
    AdaptiveSpin spin(kLimitNs);
    give_up(spin, 0);
    for (int k = 0; k < 3; ++k) {
      CHECK(spin.wait([] { return true; }));
      spin.came();  // Nobody slept.
    }
    reach = spin.reach_ns();
  }
  CHECK_EQ(reach, 3 * kLimitNs);
}

TEST(adaptive_spin_of_no_limit_never_polls) {
  AdaptiveSpin spin(0);
  CHECK_EQ(give_up(spin, 0), 0);
}

}  // namespace
}  // namespace tandem::transfer
