#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "base/threads/idle_spin.h"
#include "bindings/transfer/bind_transfer.h"
#include "bindings/transfer/bind_transfer_memory.h"
#include "bindings/status.h"
#include "transfer/engine/engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using namespace tandem::transfer;

// Runs a call without the GIL, and raises its error as an exception with the GIL.
template <class F>
auto run(F&& call) {
  std::optional<decltype(call())> result;
  {
    const nb::gil_scoped_release release;
    result.emplace(call());
  }
  if constexpr (std::is_same_v<decltype(call()), Status>)
    raise_if_error(*result);
  else
    return take(std::move(*result));
}

int64_t deadline_of(std::optional<double> seconds) {
  constexpr double kFarS = 1e9;
  if (!seconds) return std::numeric_limits<int64_t>::max() / 2;
  return now_ns() + static_cast<int64_t>(std::clamp(*seconds, 0.0, kFarS) * 1e9);
}

TransportKind kind_of(const std::string& name) {
  for (size_t i = 0; i < kTransportNames.size(); ++i)
    if (kTransportNames[i] == name) return static_cast<TransportKind>(i);
  raise({Code::kConfig, "transfer.configure",
         "there is no transport '" + name + "': local, shm, cma, tcp or file", "transport"});
}

struct FileInfo {
  std::string path;
  uint64_t length;
  bool is_direct;
  std::string direct_refusal;
};

// Python's reference to an engine and its parts. All are released without the GIL, the parts in
// order and the engine last. A forked child never releases them: threads and locks are the
// parent's, and nothing could be ended there.
template <class... Parts>
struct Owned {
  std::shared_ptr<Engine> engine;
  std::tuple<std::shared_ptr<Parts>...> parts;

  explicit Owned(std::shared_ptr<Engine> of, std::shared_ptr<Parts>... made)
      : engine(std::move(of)), parts(std::move(made)...) {}
  Owned(Owned&&) = default;
  ~Owned() {
    if (!engine) return;  // Moved from.
    if (engine->is_forked()) {
      new std::shared_ptr<Engine>(std::move(engine));
      new std::tuple<std::shared_ptr<Parts>...>(std::move(parts));
      return;
    }
    const nb::gil_scoped_release release;
    std::apply([](auto&... part) { (part.reset(), ...); }, parts);
    engine.reset();
  }

  template <class Part>
  const std::shared_ptr<Part>& get() const {
    return std::get<std::shared_ptr<Part>>(parts);
  }
};

struct TransferCore : Owned<> {
  using Owned::Owned;
};
struct CoreBatch : Owned<Batch> {
  using Owned::Owned;
};
// A call of this process that a thread or coroutine waits for.
struct CoreCall : Owned<PendingCall, Peer> {
  using Owned::Owned;
};
// A peer's call that Python handles.
struct CoreIncomingCall : Owned<IncomingCall> {
  using Owned::Owned;
};
// The calls of one engine, for an event loop; keeps the descriptor while the loop may watch it.
struct CallSource : Owned<CallQueue> {
  int fd;

  CallSource(std::shared_ptr<Engine> of, std::shared_ptr<CallQueue> served, int readable)
      : Owned(std::move(of), std::move(served)), fd(readable) {}
};

// Returns the engine, or raises in a forked child, where locks of the parent's threads may be held
// for ever.
Engine& alive(TransferCore& core) {
  if (core.engine->is_forked())
    raise({Code::kConflict, "transfer.check",
           "the engine belongs to the parent process: make one after the fork", ""});
  return *core.engine;
}

using Strings = std::vector<std::string>;

// Settings of an engine, as Python passes them; see TransferConfig.
struct CoreOptions {
  std::string name;
  nb::bytes secret;
  Strings listen;
  Strings advertise;
  Strings local_addresses;
  std::vector<double> bandwidths_bytes_per_s;
  int lanes = 0;
  Strings transports;
  int io_threads = 0;
  int copy_threads = 0;
  int spin_us = 0;
  int lease_ms = 0;
  int handshake_timeout_ms = 0;
  int stall_ms = 0;
  uint64_t min_slice_bytes = 0;
  uint64_t max_slice_bytes = 0;
  size_t max_connections = 0;
  size_t max_notifications = 0;
  int socket_buffer_bytes = 0;
  bool checksum = false;
  std::string tags = "auto";
  std::string file_backend = "auto";
  std::map<std::string, std::vector<double>> penalties;
  Strings quota_boards;
  double quota_weight = 1.0;
};

TransferCore make_core(const CoreOptions& settings) {
  EngineOptions options;
  options.server.name = settings.name;
  options.server.secret = std::string(settings.secret.c_str(), settings.secret.size());
  options.server.listen = settings.listen;
  options.server.advertise = settings.advertise;
  options.server.handshake_timeout_ns = int64_t{settings.handshake_timeout_ms} * 1'000'000;
  options.server.max_connections = settings.max_connections;
  options.server.max_notifications = settings.max_notifications;
  options.server.socket_buffer_bytes = settings.socket_buffer_bytes;
  options.server.tags.policy = settings.tags == "auto"    ? TagPolicy::kAuto
                               : settings.tags == "never" ? TagPolicy::kNever
                                                          : TagPolicy::kAlways;
  if (settings.tags == "hmac") options.server.tags.kinds = tag_bit(TagKind::kHmac);
  options.peer.local_addresses = settings.local_addresses;
  options.peer.bandwidths_bytes_per_s = settings.bandwidths_bytes_per_s;
  options.peer.lanes = settings.lanes;
  for (const std::string& transport : settings.transports)
    options.peer.transports.push_back(kind_of(transport));
  options.peer.lease_ns = int64_t{settings.lease_ms} * 1'000'000;
  options.peer.handshake_timeout_ns = options.server.handshake_timeout_ns;
  options.peer.socket_buffer_bytes = settings.socket_buffer_bytes;
  options.peer.has_checksum = settings.checksum;
  options.peer.spray.min_slice_bytes = settings.min_slice_bytes;
  options.peer.spray.max_slice_bytes = settings.max_slice_bytes;
  options.peer.spray.stall_floor_ns = int64_t{settings.stall_ms} * 1'000'000;
  options.io_threads = settings.io_threads;
  options.copy_threads = settings.copy_threads;
  options.spin_ns = int64_t{settings.spin_us} * 1'000;
  options.penalties = settings.penalties;
  options.quota_boards = settings.quota_boards;
  options.quota_weight = settings.quota_weight;
  options.file_backend = settings.file_backend == "io_uring"  ? FileBackend::kIoUring
                         : settings.file_backend == "threads" ? FileBackend::kThreads
                                                              : FileBackend::kAuto;
  return TransferCore(run([&] { return Engine::create(std::move(options)); }));
}

uint64_t register_memory(TransferCore& core, uint8_t* data, uint64_t length, bool is_writable,
                         std::shared_ptr<SharedMemory> memory, const std::string& name,
                         const std::string& location, bool remote_read, bool remote_write,
                         FileRange file = {}) {
  BufferSpec spec{
      .data = data,
      .length = length,
      .name = name,
      .location = location,
      .is_writable = is_writable,
      .can_remote_read = remote_read,
      .can_remote_write = remote_write,
      .memory = std::move(memory),
      .file = file};
  return run([&] { return core.engine->register_buffer(std::move(spec)); });
}

// (op, buffer, local_offset, segment, offset, length); op 0 is READ, 1 is WRITE.
using RequestTuple = std::tuple<int, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;

// Requests in native form, to be submitted repeatedly.
struct PreparedTransfers {
  std::vector<TransferRequest> requests;
  std::optional<TransportKind> only;
};

PreparedTransfers prepare(const std::vector<RequestTuple>& tuples,
                          const std::optional<std::string>& transport) {
  PreparedTransfers prepared;
  prepared.requests.reserve(tuples.size());
  for (const auto& [op, buffer, local_offset, segment, offset, length] : tuples)
    prepared.requests.push_back(
        {op == 0 ? Op::kRead : Op::kWrite, buffer, local_offset, segment, offset, length});
  if (transport) prepared.only = kind_of(*transport);
  return prepared;
}

CoreBatch submit_prepared(TransferCore& core, const PreparedTransfers& prepared,
                          double deadline_s) {
  return CoreBatch(core.engine, run([&] {
    return core.engine->submit(prepared.requests, deadline_of(deadline_s), prepared.only);
  }));
}

CoreBatch submit(TransferCore& core, const std::vector<RequestTuple>& tuples, double deadline_s,
                 const std::optional<std::string>& transport) {
  return submit_prepared(core, prepare(tuples, transport), deadline_s);
}

nb::bytes to_bytes(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::bytes call_peer(TransferCore& core, uint64_t segment, nb::bytes payload, double seconds) {
  std::string request(payload.c_str(), payload.size());
  return to_bytes(run([&] {
    return core.engine->call(segment, std::move(request), deadline_of(seconds));
  }));
}

CoreCall begin_call(TransferCore& core, uint64_t segment, nb::bytes payload,
                    std::shared_ptr<CallInbox> inbox, uint64_t tag) {
  std::string request(payload.c_str(), payload.size());
  auto begun = run([&] {
    return core.engine->begin_call(segment, std::move(request), std::move(inbox), tag);
  });
  return CoreCall(core.engine, std::move(begun.call), std::move(begun.peer));
}

nb::bytes await_call(CoreCall& self, double seconds) {
  return to_bytes(run([&] {
    return self.engine->await_call(*self.get<Peer>(), self.get<PendingCall>(),
                                   deadline_of(seconds));
  }));
}

Error make_refusal(const std::string& code, const std::string& where, const std::string& what) {
  for (size_t i = 0; i < kCodeNames.size(); ++i)
    if (kCodeNames[i] == code) return {static_cast<Code>(i), where, what, ""};
  return {Code::kInternal, where, what, ""};
}

// Queues an answer: bytes, or (code, where, what) of an error.
std::shared_ptr<Connection> answer_call(IncomingCall& call, nb::handle answer) {
  if (nb::isinstance<nb::bytes>(answer)) {
    const auto bytes = nb::borrow<nb::bytes>(answer);
    if (bytes.size() <= kMaxCallBytes) return call.answer({bytes.c_str(), bytes.size()});
    return call.refuse({Code::kInternal, "transfer.serve_calls",
                        "an answer of " + std::to_string(bytes.size()) + " bytes, at most " +
                            std::to_string(kMaxCallBytes), ""});
  }
  const auto [code, where, what] =
      nb::cast<std::tuple<std::string, std::string, std::string>>(answer);
  return call.refuse(make_refusal(code, where, what));
}

constexpr size_t kMaxCallsTaken = 256;

// Sends the answers, all of one connection at once.
void answer_calls(nb::list answers) {
  std::vector<std::shared_ptr<Connection>> to_flush;
  for (nb::handle item : answers) {
    const auto pair = nb::borrow<nb::tuple>(item);
    auto connection = answer_call(*nb::cast<CoreIncomingCall&>(pair[0]).get<IncomingCall>(), pair[1]);
    if (connection && std::find(to_flush.begin(), to_flush.end(), connection) == to_flush.end())
      to_flush.push_back(std::move(connection));
  }
  const nb::gil_scoped_release release;
  for (const auto& connection : to_flush) connection->flush();
  to_flush.clear();
}

using TakenCalls = std::optional<std::vector<std::shared_ptr<IncomingCall>>>;

std::optional<nb::list> to_list(const std::shared_ptr<Engine>& engine, TakenCalls taken) {
  if (!taken) return std::nullopt;
  nb::list calls;
  for (auto& call : *taken) calls.append(nb::cast(CoreIncomingCall(engine, std::move(call))));
  return calls;
}

std::optional<nb::list> wait_calls(TransferCore& core) {
  Engine& engine = alive(core);
  TakenCalls taken;
  {
    const nb::gil_scoped_release release;
    taken = engine.wait_calls(kMaxCallsTaken);
  }
  return to_list(core.engine, std::move(taken));
}

CallSource serve_calls_on_fd(TransferCore& core) {
  Engine& engine = alive(core);
  return {core.engine, engine.call_queue(), take(engine.call_queue()->begin_serving_on_fd())};
}

bool poll_sources(const std::vector<const CallSource*>& sources, int fd, double seconds) {
  std::vector<std::shared_ptr<Engine>> engines;
  for (const CallSource* source : sources) engines.push_back(source->engine);
  const int64_t limit_ns = seconds < 1.0 ? static_cast<int64_t>(seconds * 1e9) : 1'000'000'000;
  const nb::gil_scoped_release release;
  const bool is_readable = Engine::poll_requests(engines, fd, limit_ns);
  engines.clear();
  return is_readable;
}

void bind_calls(nb::module_& module) {
  nb::class_<CallInbox>(module, "CallInbox", "Where calls that have ended are collected.")
      .def(nb::new_([] { return take(CallInbox::create()); }))
      .def("fileno", &CallInbox::fd, "Readable while something is in it.")
      .def("take", &CallInbox::take, "The tags of the calls that have ended since the last call.");
  nb::class_<CoreCall>(module, "CoreCall", "A call that was begun; see TransferEngine.call_async.")
      .def("wait", &await_call, "deadline_s"_a,
           "Wait for the answer of one begun without an inbox, without the GIL. Once.")
      .def("take_answer", [](CoreCall& self) { return to_bytes(take(self.get<PendingCall>()->take_answer())); },
           "What it ended with, once; raises the error.")
      .def("abandon", [](CoreCall& self) {
             const nb::gil_scoped_release release;
             self.get<Peer>()->abandon_call(
                 self.get<PendingCall>(),
                 {Code::kCancelled, "transfer.call", "the call was cancelled", ""});
           }, "Wait no longer: it was executed once or not at all.");
  nb::class_<CoreIncomingCall>(module, "CoreIncomingCall", "A peer's call; see tandem.transfer.Call.")
      .def_prop_ro("peer", [](const CoreIncomingCall& self) { return self.get<IncomingCall>()->peer(); })
      .def_prop_ro("payload",
                   [](const CoreIncomingCall& self) {
                     return to_bytes(self.get<IncomingCall>()->payload());
                   })
      .def("answer", [](CoreIncomingCall& self, nb::handle answer) {
             const std::shared_ptr<Connection> connection = answer_call(*self.get<IncomingCall>(), answer);
             const nb::gil_scoped_release release;
             if (connection) connection->flush();
             return connection != nullptr;
           }, "answer"_a,
           nb::sig("def answer(self, answer: bytes | tuple[str, str, str]) -> bool"),
           "Send bytes, or (code, where, what) of an error; False: answered before, or in vain.");
}

void bind_call_source(nb::module_& module) {
  nb::class_<CallSource>(module, "CallSource", "Calls of an engine's peers, for an event loop.")
      .def("fileno", [](const CallSource& self) { return self.fd; },
           "Readable while there are calls, and once the engine is closed.")
      .def("take", [](const CallSource& self) {
             return to_list(self.engine, self.get<CallQueue>()->take(kMaxCallsTaken));
           }, nb::sig("def take(self) -> list[CoreIncomingCall] | None"),
           "The calls that have come. None: the engine is closed.");
  module.def("answer_calls", &answer_calls, "answers"_a,
             nb::sig("def answer_calls(answers: list[tuple[CoreIncomingCall, bytes | "
                     "tuple[str, str, str]]]) -> None"),
             "Send bytes, or (code, where, what) of errors; those of a connection in one go.");
  module.def("poll_sources", &poll_sources, "sources"_a, "fd"_a, "limit_s"_a,
             "Poll, without the GIL, for what peers send to these engines, until `fd` is readable,\n"
             "for as long as polling pays. True: it is readable.");
}

// {(transport, op, "bytes" | "parts"): count}, {(transport, "failovers"): count}
nb::dict read_counters(const TransferCounters& counters) {
  nb::dict counts;
  for (size_t kind = 0; kind < kTransportNames.size(); ++kind) {
    const nb::str name(kTransportNames[kind].data());
    for (size_t op = 0; op < 2; ++op) {
      const TransferCounters::Way& way = counters.ways[kind][op];
      const char* op_name = op == 0 ? "read" : "write";
      if (way.parts.load() == 0) continue;
      counts[nb::make_tuple(name, op_name, "bytes")] = way.bytes.load();
      counts[nb::make_tuple(name, op_name, "parts")] = way.parts.load();
    }
    if (const uint64_t failovers = counters.failovers[kind].load(); failovers > 0)
      counts[nb::make_tuple(name, "", "failovers")] = failovers;
  }
  return counts;
}

nb::list latency_buckets(const LatencyHistogram& latencies) {
  nb::list buckets;
  for (size_t i = 0; i < LatencyHistogram::kNumBuckets; ++i)
    if (latencies.counts()[i] > 0)
      buckets.append(nb::make_tuple(LatencyHistogram::bound_s(i), latencies.counts()[i]));
  return buckets;
}

constexpr const char* kCountersSig =
    "def counters(self, segment: int | None) -> dict[tuple[str, str, str], int]";

void bind_options(nb::module_& module) {
  nb::class_<CoreOptions>(module, "CoreOptions", "Settings of an engine; see TransferConfig.")
      .def(nb::init<>())
      .def_rw("name", &CoreOptions::name)
      .def_rw("secret", &CoreOptions::secret)
      .def_rw("listen", &CoreOptions::listen)
      .def_rw("advertise", &CoreOptions::advertise)
      .def_rw("local_addresses", &CoreOptions::local_addresses)
      .def_rw("bandwidths_bytes_per_s", &CoreOptions::bandwidths_bytes_per_s)
      .def_rw("lanes", &CoreOptions::lanes)
      .def_rw("transports", &CoreOptions::transports)
      .def_rw("io_threads", &CoreOptions::io_threads)
      .def_rw("copy_threads", &CoreOptions::copy_threads)
      .def_rw("spin_us", &CoreOptions::spin_us)
      .def_rw("lease_ms", &CoreOptions::lease_ms)
      .def_rw("handshake_timeout_ms", &CoreOptions::handshake_timeout_ms)
      .def_rw("stall_ms", &CoreOptions::stall_ms)
      .def_rw("min_slice_bytes", &CoreOptions::min_slice_bytes)
      .def_rw("max_slice_bytes", &CoreOptions::max_slice_bytes)
      .def_rw("max_connections", &CoreOptions::max_connections)
      .def_rw("max_notifications", &CoreOptions::max_notifications)
      .def_rw("socket_buffer_bytes", &CoreOptions::socket_buffer_bytes)
      .def_rw("checksum", &CoreOptions::checksum)
      .def_rw("tags", &CoreOptions::tags)
      .def_rw("file_backend", &CoreOptions::file_backend)
      .def_rw("penalties", &CoreOptions::penalties)
      .def_rw("quota_boards", &CoreOptions::quota_boards)
      .def_rw("quota_weight", &CoreOptions::quota_weight);
}

void bind_description(nb::module_& module) {
  nb::class_<BufferInfo>(module, "RemoteBufferInfo", "A buffer that a segment offers.")
      .def_ro("offset", &BufferInfo::offset)
      .def_ro("length", &BufferInfo::length)
      .def_ro("can_read", &BufferInfo::can_read)
      .def_ro("can_write", &BufferInfo::can_write)
      .def_ro("is_shared", &BufferInfo::is_shared)
      .def_ro("name", &BufferInfo::name)
      .def_ro("location", &BufferInfo::location);
  nb::class_<Description>(module, "SegmentDescription", "What a segment says of itself.")
      .def_ro("name", &Description::name)
      .def_ro("addresses", &Description::addresses)
      .def_ro("buffers", &Description::buffers);
  nb::class_<RailStatus>(module, "RailStatus", "A rail to a segment, as it is now.")
      .def_ro("local", &RailStatus::local)
      .def_ro("remote", &RailStatus::remote)
      .def_ro("state", &RailStatus::state)
      .def_ro("bytes_moved", &RailStatus::bytes_moved)
      .def_ro("num_resent", &RailStatus::num_resent, "Slices it had that went elsewhere.")
      .def_ro("in_flight_bytes", &RailStatus::in_flight_bytes)
      .def_ro("bandwidth_bytes_per_s", &RailStatus::bandwidth_bytes_per_s, "Learnt.")
      .def_prop_ro("tags", [](const RailStatus& self) { return std::string(tag_name(self.tags)); },
                   "Kind of the tags of its connection, gmac or hmac; empty: it has none.")
      .def_ro("predicted_s", &RailStatus::predicted_s, "Until what it has now would be moved.")
      .def_prop_ro("latency_sum_s", [](const RailStatus& self) { return self.latencies.sum_s(); })
      .def_prop_ro("latency_buckets",
                   [](const RailStatus& self) { return latency_buckets(self.latencies); },
                   nb::sig("def latency_buckets(self) -> list[tuple[float, int]]"),
                   "Slices by latency: (upper bound in seconds, count), rising, no empty ones.");
  nb::class_<FileInfo>(module, "FileInfo", "A file that is open as a segment.")
      .def_ro("path", &FileInfo::path)
      .def_ro("length", &FileInfo::length)
      .def_ro("is_direct", &FileInfo::is_direct)
      .def_ro("direct_refusal", &FileInfo::direct_refusal);
  nb::class_<PreparedTransfers>(module, "PreparedTransfers",
                                "Requests in native form; see tandem.transfer.PreparedBatch.")
      .def("__len__", [](const PreparedTransfers& self) { return self.requests.size(); });
  nb::class_<BatchCounters>(module, "BatchCounters", "Batches of an engine since it was made.")
      .def_ro("num_running", &BatchCounters::num_running)
      .def_ro("num_done", &BatchCounters::num_done)
      .def_prop_ro("num_failed", [](const BatchCounters& self) {
             nb::dict failed;
             for (size_t i = 0; i < self.num_failed.size(); ++i)
               if (self.num_failed[i] > 0) failed[kCodeNames[i].data()] = self.num_failed[i];
             return failed;
           }, nb::sig("def num_failed(self) -> dict[str, int]"), "By error code.")
      .def_prop_ro("latency_sum_s",
                   [](const BatchCounters& self) { return self.latencies.sum_s(); })
      .def_prop_ro("latency_buckets",
                   [](const BatchCounters& self) { return latency_buckets(self.latencies); },
                   nb::sig("def latency_buckets(self) -> list[tuple[float, int]]"));
}

void bind_batch(nb::module_& module) {
  nb::class_<CoreBatch>(module, "CoreBatch", "A submitted batch; see tandem.transfer.Batch.")
      .def_prop_ro("is_finished", [](const CoreBatch& self) { return self.get<Batch>()->is_finished(); })
      .def("wait", [](CoreBatch& self, std::optional<double> seconds) {
             run([&] { return self.engine->wait(self.get<Batch>(), deadline_of(seconds)); });
           }, "deadline_s"_a.none())
      .def("check", [](CoreBatch& self) {
             if (self.get<Batch>()->is_finished()) raise_if_error(self.get<Batch>()->status());
           }, "Raise what a finished batch ended with, if it failed.")
      .def("cancel", [](CoreBatch& self) {
             const nb::gil_scoped_release release;
             self.engine->cancel(self.get<Batch>());
           })
      .def("bytes_done", [](CoreBatch& self, size_t index) {
             if (index >= self.get<Batch>()->items().size())
               raise({Code::kNotFound, "transfer.status",
                      "transfer " + std::to_string(index) + " of " +
                          std::to_string(self.get<Batch>()->items().size()), "index"});
             return self.get<Batch>()->items()[index].bytes_done.load();
           }, "index"_a)
      .def("completion_fd", [](CoreBatch& self) {
             return run([&] { return self.engine->completion_fd(self.get<Batch>()); });
           });
}

}  // namespace

void bind_transfer_engine(nb::module_& module) {
  bind_options(module);
  bind_description(module);
  bind_batch(module);
  bind_calls(module);
  bind_call_source(module);
  module.def("has_gmac", [] { return (available_tags() & tag_bit(TagKind::kGmac)) != 0; },
             "Whether a libcrypto was found whose GMAC is right.");
  module.def("list_interfaces", &list_interfaces,
             "Name and address of each network interface that has one.");
  nb::class_<TransferCore>(module, "TransferCore", "The native engine; see tandem.transfer.")
      .def(nb::new_(&make_core), "options"_a)
      .def("register_host", [](TransferCore& core, const HostMemory& memory,
                               const std::string& name, const std::string& location,
                               bool remote_read, bool remote_write, int fd,
                               uint64_t file_offset) {
             FileRange file;
             if (fd >= 0)
               file = run([&] {
                 return transfer::check_file_range(fd, file_offset, memory.data, memory.size);
               });
             return register_memory(core, memory.data, memory.size, !memory.is_readonly, nullptr,
                                    name, location, remote_read, remote_write, file);
           }, "memory"_a, nb::kw_only(), "name"_a, "location"_a, "remote_read"_a,
           "remote_write"_a, "fd"_a = -1, "file_offset"_a = 0)
      .def("register_shared", [](TransferCore& core, const SharedArray& array,
                                 const std::string& name, const std::string& location,
                                 bool remote_read, bool remote_write) {
             return register_memory(core, array.memory->data(), array.memory->size(), true,
                                    array.memory, name, location, remote_read, remote_write);
           }, "memory"_a, nb::kw_only(), "name"_a, "location"_a, "remote_read"_a, "remote_write"_a)
      .def("unregister", [](TransferCore& core, uint64_t base, double seconds) {
             run([&] { return core.engine->unregister(base, deadline_of(seconds)); });
           }, "base"_a, "deadline_s"_a)
      .def("open", [](TransferCore& core, const std::string& address, double seconds) {
             return run([&] { return core.engine->open(address, deadline_of(seconds)); });
           }, "address"_a, "deadline_s"_a)
      .def("close_segment", [](TransferCore& core, uint64_t segment) {
             run([&] { return core.engine->close_segment(segment); });
           }, "segment"_a)
      .def("describe", [](TransferCore& core, uint64_t segment, double seconds) {
             return run([&] { return core.engine->describe(segment, deadline_of(seconds)); });
           }, "segment"_a, "deadline_s"_a)
      .def("rails", [](TransferCore& core, uint64_t segment) {
             return run([&] { return core.engine->find_peer(segment); })->rails();
           }, "segment"_a)
      .def("refusals", [](TransferCore& core, uint64_t segment) {
             return run([&] { return core.engine->find_peer(segment); })->refusals();
           }, "segment"_a)
      .def("segment_epoch", [](TransferCore& core, uint64_t segment) {
             return run([&] { return core.engine->find_peer(segment); })->epoch();
           }, "segment"_a)
      .def("submit", &submit, "requests"_a, "deadline_s"_a, "transport"_a.none())
      .def("prepare", [](TransferCore&, const std::vector<RequestTuple>& requests,
                         const std::optional<std::string>& transport) {
             return prepare(requests, transport);
           }, "requests"_a, "transport"_a.none())
      .def("submit_prepared", &submit_prepared, "prepared"_a, "deadline_s"_a)
      .def("open_file", [](TransferCore& core, const std::string& path, bool writable,
                           uint64_t create_bytes, bool direct) {
             return run([&] {
               return core.engine->open_file({path, writable, create_bytes, direct});
             });
           }, "path"_a, nb::kw_only(), "writable"_a, "create_bytes"_a, "direct"_a)
      .def("sync_file", [](TransferCore& core, uint64_t segment) {
             const auto file = run([&] { return core.engine->find_file(segment); });
             run([&] { return file->sync(); });
           }, "segment"_a)
      .def("file_info", [](TransferCore& core, uint64_t segment) {
             const auto file = run([&] { return core.engine->find_file(segment); });
             return FileInfo{file->path(), file->length(), file->is_direct(),
                             file->direct_refusal()};
           }, "segment"_a)
      .def_prop_ro("file_backend",
                   [](TransferCore& core) { return alive(core).file_backend(); },
                   "(io_uring or threads, why not io_uring); empty before the first file.")
      .def("counters", [](TransferCore& core, std::optional<uint64_t> segment) {
             if (!segment) return read_counters(alive(core).counters());
             return read_counters(run([&] { return core.engine->find_peer(*segment); })->counters());
           }, "segment"_a.none(), nb::sig(kCountersSig),
           "What moved to a segment, or (None) inside this process and to files.")
      .def_prop_ro("quota_rates", [](TransferCore& core) { return alive(core).quota_rates(); },
                   "Bytes per second that each NIC gives us now; infinity: not held.")
      .def_prop_ro("num_refused_records",
                   [](TransferCore& core) { return alive(core).num_refused_records(); },
                   "Of peers' records: altered on the way. Each ended its connection.")
      .def_prop_ro("batch_counters",
                   [](TransferCore& core) { return alive(core).batch_counters(); })
      .def("set_faults", [](TransferCore& core, const std::string& transport, uint64_t seed,
                            double drop, double corrupt, double duplicate, double reorder,
                            double delay, double delay_s, bool is_dead) {
             const FaultRates rates{drop,  corrupt, duplicate, reorder,
                                    delay, static_cast<int64_t>(delay_s * 1e9), is_dead};
             alive(core).set_faults(kind_of(transport),
                                   std::make_shared<FaultPlan>(seed, rates));
           }, "transport"_a, nb::kw_only(), "seed"_a, "drop"_a, "corrupt"_a, "duplicate"_a,
           "reorder"_a, "delay"_a, "delay_s"_a, "is_dead"_a)
      .def("clear_faults", [](TransferCore& core, const std::string& transport) {
             const auto plan = alive(core).set_faults(kind_of(transport), nullptr);
             return plan ? plan->num_faults() : 0;
           }, "transport"_a, "Return how many chunks went wrong since set_faults.")
      .def("use_round_robin", [](TransferCore& core, uint64_t segment) {
             run([&] { return core.engine->find_peer(segment); })->use_round_robin();
           }, "segment"_a, "Give slices to rails in turn, whatever their speed: a baseline.")
      .def("call", &call_peer, "segment"_a, "payload"_a, "deadline_s"_a)
      .def("begin_call", &begin_call, "segment"_a, "payload"_a, "inbox"_a.none() = nullptr,
           "tag"_a = 0)
      .def("serve_calls", [](TransferCore& core) { run([&] { return core.engine->serve_calls(); }); })
      .def("serve_calls_on_fd", &serve_calls_on_fd, "As serve_calls, for an event loop.")
      .def("wait_calls", &wait_calls, nb::sig("def wait_calls(self) -> list[CoreIncomingCall] | None"),
           "Wait for calls of peers, without the GIL. None: the engine is closed.")
      .def("notify", [](TransferCore& core, uint64_t segment, const std::string& name,
                        nb::bytes payload, double seconds) {
             const std::string bytes(payload.c_str(), payload.size());
             run([&] { return core.engine->notify(segment, name, bytes, deadline_of(seconds)); });
           }, "segment"_a, "name"_a, "payload"_a, "deadline_s"_a)
      .def("notifications", [](TransferCore& core, double seconds) {
             nb::list list;
             for (const Notification& one :
                  run([&] { return core.engine->take_notifications(deadline_of(seconds)); }))
               list.append(nb::make_tuple(one.peer, one.name,
                                          nb::bytes(one.payload.data(), one.payload.size())));
             return list;
           }, "deadline_s"_a,
           nb::sig("def notifications(self, deadline_s: float) -> list[tuple[str, str, bytes]]"))
      .def("close", [](TransferCore& core, double seconds) {
             run([&] { return core.engine->close(deadline_of(seconds)); });
           }, "deadline_s"_a)
      .def_prop_ro("addresses", [](TransferCore& core) { return core.engine->addresses(); })
      .def_prop_ro("epoch", [](TransferCore& core) { return core.engine->epoch(); })
      .def_prop_ro("is_forked", [](TransferCore& core) { return core.engine->is_forked(); })
      .def("bytes_copied", [](TransferCore& core, const std::string& transport) {
             return core.engine->bytes_copied(kind_of(transport));
           }, "transport"_a);
}

}  // namespace tandem::bindings
