// Goal: polls last as long as they pay, and stop where they do harm. Method: a fake clock, which
// advances as polls yield.
#include "transfer/loop/adaptive_spin.h"

#include "base/test.h"

namespace tandem::transfer {
namespace {

constexpr int64_t kLimitNs = 200'000;
constexpr int64_t kRoundNs = 1'000;

struct FakeTime {
  static inline int64_t now_ns = 1;
  static inline int64_t yield_ns = kRoundNs;  // What others take each time.
  static int64_t now() { return now_ns; }
  static void yield() { now_ns += yield_ns; }
};

using Spin = BasicAdaptiveSpin<FakeTime>;

bool never() { return false; }

// Polls without success; the event comes `after_ns` later. Returns the limit of the next poll.
int64_t give_up(Spin& spin, int64_t after_ns) {
  CHECK(!spin.wait(never));
  FakeTime::now_ns += after_ns;
  spin.came();
  return spin.reach_ns();
}

// Returns the duration of a poll without success.
int64_t poll(Spin& spin) {
  const int64_t begin = FakeTime::now();
  CHECK(!spin.wait(never));
  return FakeTime::now() - begin;
}

TEST(adaptive_spin_polls_longer_where_that_would_have_paid) {
  Spin spin(kLimitNs);
  CHECK_EQ(spin.reach_ns(), kLimitNs);
  CHECK_EQ(give_up(spin, 2 * kLimitNs - 2 * kRoundNs), 3 * kLimitNs);
}

TEST(adaptive_spin_polls_no_longer_for_what_comes_late) {
  Spin spin(kLimitNs);
  CHECK_EQ(give_up(spin, 2 * kLimitNs), kLimitNs);
}

TEST(adaptive_spin_goes_back_when_the_longer_poll_was_in_vain) {
  Spin spin(kLimitNs);
  CHECK_EQ(give_up(spin, 0), 3 * kLimitNs);
  CHECK_EQ(poll(spin), 3 * kLimitNs + kRoundNs);
  spin.came();
  CHECK_EQ(spin.reach_ns(), kLimitNs);
}

TEST(adaptive_spin_keeps_its_reach_while_polls_succeed) {
  Spin spin(kLimitNs);
  give_up(spin, 0);
  for (int k = 0; k < 3; ++k) {
    CHECK(spin.wait([] { return true; }));
    spin.came();  // Nobody slept.
  }
  CHECK_EQ(spin.reach_ns(), 3 * kLimitNs);
}

TEST(adaptive_spin_is_barred_longer_each_time_that_others_come_between) {
  Spin spin(kLimitNs);
  FakeTime::yield_ns = 3'000'000;  // A slice of the scheduler's.
  int64_t bar_ns = 5'000'000;
  for (int k = 0; k < 8; ++k) {
    CHECK_EQ(poll(spin), FakeTime::yield_ns);  // It sees one of them, and leaves.
    FakeTime::now_ns += bar_ns - 1;
    CHECK_EQ(poll(spin), 0);
    FakeTime::now_ns += 1;
    bar_ns = std::min<int64_t>(2 * bar_ns, 320'000'000);
  }
  FakeTime::yield_ns = kRoundNs;
  int rounds = 0;
  CHECK(spin.wait([&] { return ++rounds == 100; }));  // That went well: the next bar is short.
  FakeTime::yield_ns = 3'000'000;
  CHECK_EQ(poll(spin), FakeTime::yield_ns);
  FakeTime::yield_ns = kRoundNs;
  FakeTime::now_ns += 5'000'000;
  CHECK(poll(spin) > kLimitNs);
}

TEST(adaptive_spin_lets_short_work_of_others_pass) {
  Spin spin(kLimitNs);
  FakeTime::yield_ns = 400'000;  // Of who works on the answer.
  CHECK_EQ(poll(spin), FakeTime::yield_ns);
  FakeTime::yield_ns = kRoundNs;
  CHECK(poll(spin) > kLimitNs);  // Nothing bars it.
}

TEST(adaptive_spin_of_no_limit_never_polls) {
  Spin spin(0);
  CHECK_EQ(give_up(spin, 0), 0);
}

}  // namespace
}  // namespace tandem::transfer
