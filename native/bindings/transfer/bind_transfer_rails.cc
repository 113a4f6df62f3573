#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/status.h"
#include "bindings/transfer/bind_transfer.h"
#include "transfer/engine/fair_share.h"
#include "transfer/engine/fence_ledger.h"
#include "transfer/wire/wire.h"
#include "transfer/rails/rail_set.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using namespace tandem::transfer;

void check_rail(const RailSet& rails, uint32_t rail) {
  if (rail >= rails.num_rails())
    raise({Code::kNotFound, "rails.find",
           "rail " + std::to_string(rail) + " of " + std::to_string(rails.num_rails()), "rail"});
}

RailSet make_set(uint64_t min_slice_bytes, uint64_t max_slice_bytes, int64_t slice_ns,
                 int64_t window_ns, int64_t stall_floor_ns) {
  if (min_slice_bytes < 1 || min_slice_bytes > max_slice_bytes || slice_ns < 1 || window_ns < 1 ||
      stall_floor_ns < 1)
    raise({Code::kConfig, "rails.create",
           "slices of " + std::to_string(min_slice_bytes) + " to " +
               std::to_string(max_slice_bytes) + " bytes: give 1 <= min <= max and times above 0",
           "min_slice_bytes"});
  SprayOptions options;
  options.min_slice_bytes = min_slice_bytes;
  options.max_slice_bytes = max_slice_bytes;
  options.slice_ns = slice_ns;
  options.window_ns = window_ns;
  options.stall_floor_ns = stall_floor_ns;
  return RailSet(options);
}

uint32_t add_rail(RailSet& rails, double bandwidth_bytes_per_s, double penalty) {
  if (!(bandwidth_bytes_per_s > 0) || !(penalty > 0))
    raise({Code::kConfig, "rails.add", "bandwidth and penalty must be above 0",
           "bandwidth_bytes_per_s"});
  return rails.add_rail({.bandwidth_bytes_per_s = bandwidth_bytes_per_s, .penalty = penalty});
}

void check_ticket(const RailSet& rails, uint64_t ticket) {
  if (!rails.has_ticket(ticket))
    raise({Code::kNotFound, "rails.find",
           "ticket " + std::to_string(ticket) + " has ended or never was", "ticket"});
}

std::optional<SliceChoice> choose(RailSet& rails, int64_t now_ns, uint64_t remaining,
                                  uint64_t total, size_t location) {
  if (remaining < 1 || remaining > total)
    raise({Code::kConfig, "rails.choose",
           std::to_string(remaining) + " bytes left of " + std::to_string(total), "remaining"});
  return rails.choose(now_ns, remaining, total, location);
}

FenceDebt make_debt(nb::bytes session, uint32_t connection) {
  if (session.size() != kSessionBytes)
    raise({Code::kConfig, "fences.add",
           "a session of " + std::to_string(session.size()) + " bytes, not " +
               std::to_string(kSessionBytes), "session"});
  return {std::string(session.c_str(), session.size()), connection};
}

using DebtTuple = std::pair<nb::bytes, uint32_t>;

std::pair<bool, std::vector<DebtTuple>> take_due(FenceLedger& ledger, uint64_t epoch,
                                                 uint64_t carrier) {
  const FenceLedger::Due due = ledger.take_due(epoch, carrier);
  std::vector<DebtTuple> debts;
  for (const FenceDebt& debt : due.debts)
    debts.emplace_back(nb::bytes(debt.session.data(), debt.session.size()), debt.connection);
  return {due.may_write, std::move(debts)};
}

void bind_fences(nb::module_& module) {
  nb::class_<FenceLedger>(module, "FenceLedger",
                          "Connections that were given up with WRITEs unconfirmed, by epoch.\n\n"
                          "Thread-safe. Every carrier of slices sends what `take_due` gives ahead\n"
                          "of them; copies wait while it says that a debt is left.")
      .def(nb::init<>())
      .def("next_carrier", &FenceLedger::next_carrier)
      .def("add", [](FenceLedger& ledger, uint64_t epoch, nb::bytes session, uint32_t connection,
                     bool may_write) {
             ledger.add(epoch, make_debt(session, connection), may_write);
           }, "epoch"_a, "session"_a, "connection"_a, nb::kw_only(), "may_write"_a = true,
           "Raises: ConfigError (a session has 16 bytes).")
      .def("take_due", &take_due, "epoch"_a, "carrier"_a,
           "Return whether copies must wait, and what this carrier has not sent yet.")
      .def("settle", [](FenceLedger& ledger, uint64_t epoch, const std::vector<DebtTuple>& tuples) {
             std::vector<FenceDebt> debts;
             for (const auto& [session, connection] : tuples)
               debts.push_back(make_debt(session, connection));
             ledger.settle(epoch, debts);
           }, "epoch"_a, "debts"_a, "The peer has closed these connections.")
      .def("owes", &FenceLedger::owes, "epoch"_a, "Whether copies to this peer must wait.")
      .def("__len__", &FenceLedger::size);
}

}  // namespace

void bind_transfer_rails(nb::module_& module) {
  bind_fences(module);
  nb::enum_<RailState>(module, "RailState", "Whether a rail may carry slices.")
      .value("HEALTHY", RailState::kHealthy)
      .value("PAUSED", RailState::kPaused, "Errors or slow slices; a probe will decide.")
      .value("CLOSED", RailState::kClosed, "No connection; one will be tried.")
      .value("TERMINATED", RailState::kTerminated, "For good: the peer is gone or refused us.");
  nb::class_<SliceChoice>(module, "SliceChoice", "The next slice: its rail, length and ticket.")
      .def_ro("ticket", &SliceChoice::ticket)
      .def_ro("rail", &SliceChoice::rail)
      .def_ro("num_bytes", &SliceChoice::bytes);
  nb::class_<RailSet>(module, "RailSet",
                      "The slice-spraying decider: pure, time is an argument (nanoseconds).\n\n"
                      "Not thread-safe. Tickets end in exactly one of complete, fail, forget or\n"
                      "on_disconnect; an unknown ticket is an error of the caller.")
      .def(nb::new_(&make_set), nb::kw_only(), "min_slice_bytes"_a = 64 << 10,
           "max_slice_bytes"_a = 4 << 20, "slice_ns"_a = 1'000'000, "window_ns"_a = 4'000'000,
           "stall_floor_ns"_a = 200'000'000, "Raises: ConfigError (range).")
      .def("add_rail", &add_rail, "bandwidth_bytes_per_s"_a, "penalty"_a = 1.0,
           "Add a rail, closed until on_connect; returns its index.")
      .def("choose", &choose, "now_ns"_a, "remaining"_a, "total"_a,
           "location"_a = 0,
           "Give the next slice of a transfer to a rail, or None: wait.")
      .def("set_penalty", [](RailSet& rails, uint32_t rail, size_t location, double penalty) {
             check_rail(rails, rail);
             if (!(penalty > 0) || location < 1 || location > 4096)
               raise({Code::kConfig, "rails.set_penalty",
                      "give a penalty above 0 and a location from 1 to 4096", "penalty"});
             rails.set_penalty(rail, location, penalty);
           }, "rail"_a, "location"_a, "penalty"_a, "P of the prediction for memory there.")
      .def("hold", [](RailSet& rails, uint32_t rail, int64_t until_ns) {
             check_rail(rails, rail);
             rails.hold(rail, until_ns);
           }, "rail"_a, "until_ns"_a, "No slice for this rail before then.")
      .def("use_round_robin", &RailSet::use_round_robin, "A baseline: rails in turn.")
      .def("complete", [](RailSet& rails, uint64_t ticket, int64_t now_ns) {
             check_ticket(rails, ticket);
             rails.complete(ticket, now_ns);
           }, "ticket"_a, "now_ns"_a)
      .def("fail", [](RailSet& rails, uint64_t ticket, int64_t now_ns) {
             check_ticket(rails, ticket);
             rails.fail(ticket, now_ns);
           }, "ticket"_a, "now_ns"_a)
      .def("forget", [](RailSet& rails, uint64_t ticket) {
             check_ticket(rails, ticket);
             rails.forget(ticket);
           }, "ticket"_a, "The slice was cancelled: learn nothing.")
      .def("on_progress", [](RailSet& rails, uint32_t rail, int64_t now_ns) {
             check_rail(rails, rail);
             rails.on_progress(rail, now_ns);
           }, "rail"_a, "now_ns"_a)
      .def("is_look_due", [](RailSet& rails, uint32_t rail, int64_t now_ns) {
             check_rail(rails, rail);
             return rails.is_look_due(rail, now_ns);
           }, "rail"_a, "now_ns"_a)
      .def("on_look", [](RailSet& rails, uint32_t rail, int64_t now_ns, bool owes,
                         int64_t heard_ns) {
             check_rail(rails, rail);
             rails.on_look(rail, now_ns, owes, heard_ns);
           }, "rail"_a, "now_ns"_a, "owes"_a, "heard_ns"_a,
           "Whether its host owes acknowledgements, and when it was last heard of.")
      .def("is_connect_due", [](RailSet& rails, uint32_t rail, int64_t now_ns) {
             check_rail(rails, rail);
             return rails.is_connect_due(rail, now_ns);
           }, "rail"_a, "now_ns"_a)
      .def("begin_connect", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             rails.begin_connect(rail);
           }, "rail"_a)
      .def("on_connect", [](RailSet& rails, uint32_t rail, int64_t now_ns, int64_t answer_ns) {
             check_rail(rails, rail);
             rails.on_connect(rail, now_ns, answer_ns);
           }, "rail"_a, "now_ns"_a, "answer_ns"_a = 0,
           "`answer_ns`: how long the other host took to answer the attempt.")
      .def("patience_ns", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             return rails.patience_ns(rail);
           }, "rail"_a, "How long an attempt to connect may stay without that answer.")
      .def("on_disconnect", [](RailSet& rails, uint32_t rail, int64_t now_ns) {
             check_rail(rails, rail);
             return rails.on_disconnect(rail, now_ns);
           }, "rail"_a, "now_ns"_a, "Returns the tickets it held.")
      .def("terminate", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             rails.terminate(rail);
           }, "rail"_a)
      .def("is_stalled", [](RailSet& rails, uint32_t rail, int64_t now_ns) {
             check_rail(rails, rail);
             return rails.is_stalled(rail, now_ns);
           }, "rail"_a, "now_ns"_a)
      .def("state", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             return rails.health(rail).state();
           }, "rail"_a)
      .def("in_flight_bytes", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             return rails.predictor(rail).in_flight_bytes();
           }, "rail"_a)
      .def("effective_bandwidth", [](RailSet& rails, uint32_t rail) {
             check_rail(rails, rail);
             return rails.predictor(rail).effective_bandwidth();
           }, "rail"_a, "Learnt, bytes per second.")
      .def("next_event_ns", &RailSet::next_event_ns, "has_waiting"_a = true);
  module.def(
      "split_capacity",
      [](double capacity, const std::vector<std::pair<double, double>>& claims) {
        std::vector<ShareClaim> native;
        for (const auto& [weight, demand] : claims) {
          if (!(weight > 0) || !(demand >= 0))
            raise({Code::kConfig, "rails.split", "a claim needs weight > 0 and demand >= 0",
                   "claims"});
          native.push_back({weight, demand});
        }
        return split_capacity(capacity, native);
      },
      "capacity"_a, "claims"_a, "Weighted max-min shares of (weight, demand) claims.");
}

}  // namespace tandem::bindings
