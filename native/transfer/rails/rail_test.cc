// Examples of the rails' decisions; tests/transfer/rails/test_rails_props.py runs them over seeded
// schedules.
#include <cmath>
#include <numeric>

#include "base/test.h"
#include "transfer/engine/fair_share.h"
#include "transfer/rails/rail_set.h"

namespace tandem::transfer {
namespace {

constexpr int64_t kMs = 1'000'000;

RailSet make_set(std::initializer_list<double> bandwidths) {
  RailSet rails{SprayOptions{}};
  for (const double bandwidth : bandwidths)
    rails.on_connect(rails.add_rail({.bandwidth_bytes_per_s = bandwidth}), 0);
  return rails;
}

bool is_near(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance; }

TEST(rail_predictor_counts_reservations) {
  RailPredictor rail({.bandwidth_bytes_per_s = 1e6});
  CHECK(is_near(rail.predict_s(1000), 0.001, 1e-12));
  rail.reserve(4000);
  CHECK(is_near(rail.predict_s(1000), 0.005, 1e-12));
  rail.release(4000);
  CHECK_EQ(rail.in_flight_bytes(), 0u);
}

TEST(rail_predictor_learns_speed_and_fixed_cost) {
  RailPredictor rail({.bandwidth_bytes_per_s = 1e9});
  for (int i = 0; i < 100; ++i) rail.observe(rail.load_s(1'000'000), 0.010);
  CHECK(is_near(rail.effective_bandwidth(), 1e8, 1e6));
  RailPredictor small({.bandwidth_bytes_per_s = 1e9});
  small.observe(small.load_s(1'000'000), 0.001);
  for (int i = 0; i < 200; ++i) small.observe(small.load_s(0), 0.0005);
  CHECK(is_near(small.predict_s(0), 0.0005, 1e-5));
}

TEST(rail_health_walks_its_states) {
  RailHealth rail{HealthOptions{}};
  CHECK(rail.is_connect_due(0));
  rail.on_connect(0);
  CHECK(rail.may_carry());
  rail.on_error(0);
  CHECK(rail.state() == RailState::kPaused && !rail.is_probe_due(49 * kMs));
  CHECK(rail.is_probe_due(50 * kMs));
  rail.begin_probe();
  CHECK(!rail.is_probe_due(50 * kMs));
  rail.on_error(50 * kMs);  // The cool-down doubles.
  CHECK(!rail.is_probe_due(149 * kMs) && rail.is_probe_due(150 * kMs));
  rail.begin_probe();
  rail.on_success();
  CHECK(rail.may_carry());
  rail.on_disconnect(200 * kMs);
  CHECK(rail.state() == RailState::kClosed && rail.is_connect_due(200 * kMs));
  rail.begin_connect();
  rail.on_disconnect(201 * kMs);  // The attempt failed: the next one waits.
  CHECK(!rail.is_connect_due(205 * kMs) && rail.is_connect_due(211 * kMs));
  rail.begin_connect();
  rail.on_connect(212 * kMs);
  CHECK(!rail.may_carry() && rail.is_probe_due(212 * kMs));
  rail.terminate();
  rail.on_disconnect(213 * kMs);
  rail.on_connect(213 * kMs);
  CHECK(rail.state() == RailState::kTerminated);
}

TEST(rail_set_cuts_by_the_speed_of_the_rail) {
  RailSet fast = make_set({1e9});
  RailSet slow = make_set({1e8});
  const uint64_t total = 64 << 20;
  const SliceChoice a = *fast.choose(0, total, total);
  const SliceChoice b = *slow.choose(0, total, total);
  CHECK(a.bytes > 900'000 && a.bytes < 1'100'000);
  CHECK(b.bytes > 90'000 && b.bytes < 110'000);
  // A short transfer is split by speed, and never below the least slice.
  RailSet pair = make_set({1e9, 1e9});
  CHECK_EQ(pair.choose(0, 512 << 10, 512 << 10)->bytes, uint64_t{256 << 10});
  CHECK_EQ(pair.choose(0, 4096, 4096)->bytes, uint64_t{4096});
  CHECK_EQ(pair.choose(0, 90 << 10, 90 << 10)->bytes, uint64_t{90 << 10});
}

TEST(rail_set_fills_the_window_then_waits) {
  RailSet rails = make_set({1e9});
  const uint64_t total = 256 << 20;
  int num_taken = 0;
  uint64_t ticket = 0;
  while (const auto choice = rails.choose(0, total, total)) {
    ++num_taken;
    ticket = choice->ticket;
  }
  CHECK(num_taken >= 8 && num_taken <= 12);  // 10 ms of slices of 1 ms.
  rails.complete(ticket, kMs);
  CHECK(rails.choose(kMs, total, total).has_value());
}

TEST(rail_set_returns_the_tickets_of_a_lost_rail) {
  RailSet rails = make_set({1e9, 1e9});
  const uint64_t total = 256 << 20;
  size_t held = 0;
  for (int i = 0; i < 2; ++i) held += rails.choose(0, total, total)->rail == 0;
  CHECK_EQ(rails.on_disconnect(0, 1).size(), held);
  CHECK_EQ(rails.predictor(0).in_flight_bytes(), 0u);
  CHECK_EQ(rails.choose(1, total, total)->rail, 1u);
  rails.begin_connect(0);
  rails.on_connect(0, 2);
  const SliceChoice probe = *rails.choose(2, total, total);
  CHECK_EQ(probe.rail, 0u);
  CHECK_EQ(probe.bytes, uint64_t{64 << 10});
  CHECK_EQ(rails.choose(2, total, total)->rail, 1u);
  rails.complete(probe.ticket, 3);
  CHECK(rails.health(0).may_carry());
}

TEST(rail_set_finds_a_silent_rail) {
  RailSet rails = make_set({1e9});
  CHECK_EQ(rails.next_event_ns(), INT64_MAX);
  rails.choose(0, 1000, 1000);
  CHECK(!rails.is_stalled(0, 199 * kMs));
  rails.on_progress(0, 100 * kMs);
  CHECK(!rails.is_stalled(0, 299 * kMs));
  CHECK(rails.is_stalled(0, 301 * kMs));
}

TEST(fair_share_follows_weights_and_passes_on_what_is_left) {
  const std::vector<double> busy = split_capacity(100, {{1, 1000}, {3, 1000}});
  CHECK(is_near(busy[0], 25, 1e-9) && is_near(busy[1], 75, 1e-9));
  const std::vector<double> idle = split_capacity(100, {{1, 1000}, {3, 10}, {1, 0}});
  CHECK(is_near(idle[0], 90, 1e-9) && is_near(idle[1], 10, 1e-9) && idle[2] == 0);
  CHECK(split_capacity(100, {}).empty());
}

}  // namespace
}  // namespace tandem::transfer
