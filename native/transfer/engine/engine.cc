#include "transfer/engine/engine.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <system_error>
#include <utility>

#include "base/threads/idle_spin.h"
#include "transfer/loop/adaptive_spin.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

// The last pinned buffer: a batch pins each buffer once, not once for each transfer, and looks a
// segment up once for many transfers.
struct LastPin {
  uint64_t base = 0;
  Op op = Op::kRead;
  uint8_t* data = nullptr;
  uint64_t length = 0;
  size_t location = 0;
};

Error closed_error() { return {Code::kConflict, "transfer.check", "the engine is closed", ""}; }

Status not_found(uint64_t segment) {
  return {Code::kNotFound, "transfer.find",
          "segment " + std::to_string(segment) + " is not open: call open()", "segment"};
}

}  // namespace

Result<std::shared_ptr<Engine>> Engine::create(EngineOptions options) {
  const ProcessId own = read_own_process();
  options.server.process = options.peer.process = own;
  options.peer.name = options.server.name;
  options.peer.secret = options.server.secret;
  options.peer.tags = options.server.tags;
  options.peer.refused = options.server.refused;
  const std::string epoch = random_bytes(sizeof options.server.epoch);
  std::copy(epoch.begin(), epoch.end(), reinterpret_cast<char*>(&options.server.epoch));
  options.server.epoch |= 1;  // 0 means any.
  for (const std::string& board : options.quota_boards) {
    Result<std::shared_ptr<NicQuota>> quota = NicQuota::join(board, options.quota_weight, own);
    if (!quota.is_ok()) return quota.error();
    options.peer.quotas.push_back(std::move(quota.value()));
  }
  options.peer.mapped_files = std::make_shared<MappedFiles>();
  if (!options.peer.fences) options.peer.fences = process_fences();
  options.peer.penalties.emplace_back();  // Location 0: unknown.
  for (const auto& [location, penalties] : options.penalties)
    options.peer.penalties.push_back(penalties);
  std::shared_ptr<Engine> engine(new Engine(std::move(options)));
  if (Status status = engine->start(); !status.is_ok()) {
    static_cast<void>(engine->close(0));
    return status.error();
  }
  return engine;
}

Status Engine::start() {
  own_segment_ = make_local_mapping(&registry_);
  for (const auto& [location, penalties] : options_.penalties)
    locations_.emplace(location, locations_.size() + 1);
  for (int i = 0; i < options_.io_threads; ++i) {
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::start(options_.spin_ns);
    if (!loop.is_ok()) return loop.error();
    loops_.push_back(std::move(loop.value()));
    loop_pointers_.push_back(loops_.back().get());
  }
  Result<std::unique_ptr<Copier>> copier = Copier::start(
      options_.copy_threads, [this](Piece piece, TransportKind kind, Error error) {
        const std::shared_ptr<Batch> batch = piece.batch;  // Holds the peer.
        if (Peer* peer = piece.transfer().peer)
          peer->fall_back(std::move(piece), kind, std::move(error));
        else
          abort(batch, std::move(error));
      });
  if (!copier.is_ok()) return copier.error();
  copier_ = std::move(copier.value());
  Result<std::shared_ptr<Server>> server =
      Server::start(options_.server, &registry_, loop_pointers_, [this](int64_t due) { schedule(due); });
  if (!server.is_ok()) return server.error();
  server_ = std::move(server.value());
  link_watch_ = LinkWatch::start(
      loop_pointers_[0], [this](const std::vector<SocketAddress>& addresses, bool is_up) {
        for (const auto& [segment, peer] : peers()) peer->on_link(addresses, is_up);
      });
  try {
    timer_ = std::thread([this] { run_timer(); });
  } catch (const std::system_error& error) {
    return {Code::kCapacity, "transfer.start", std::string("no thread: ") + error.what(), ""};
  }
  pthread_setname_np(timer_.native_handle(), "tandem-timer");
  return {};
}

Engine::~Engine() { static_cast<void>(close(0)); }

bool Engine::enter() {
  int count = num_uses_.load(std::memory_order_relaxed);
  while (count > 0 && !num_uses_.compare_exchange_weak(count, count + 1)) {
  }
  return count > 0;
}

void Engine::leave() {
  if (num_uses_.fetch_sub(1) == 1) retire();
}

void Engine::retire() {
  {
    const MutexLock lock(timer_mutex_);
    is_timer_stopping_ = true;
    timer_changed_.notify_all();
  }
  if (timer_.joinable()) timer_.join();
  if (link_watch_) link_watch_->stop();
  link_watch_.reset();
  if (copier_) copier_->stop();  // Its threads ring the bells of loops.
  loops_.clear();                // Joins; no handler runs any more.
  std::unique_ptr<FileIo> file_io;
  {
    const MutexLock lock(mutex_);
    file_io = std::move(file_io_);
  }
  if (file_io) FileIo::stop(std::move(file_io));
}

bool Engine::is_forked() const { return owner_pid_ != static_cast<int>(::getpid()); }

Status Engine::check_open() const {
  if (is_forked())
    return {Code::kConflict, "transfer.check",
            "the engine belongs to the parent process: make one after the fork", ""};
  const MutexLock lock(mutex_);
  if (is_closed_) return closed_error();
  return {};
}

Status Engine::close(int64_t deadline_ns) {
  if (is_forked()) return {};
  std::map<uint64_t, std::shared_ptr<Peer>> peers;
  std::multimap<int64_t, std::shared_ptr<Batch>> batches;
  {
    const MutexLock lock(mutex_);
    if (is_closed_) return {};
    is_closed_ = true;
    peers.swap(peers_);
    files_.clear();
    batches.swap(watched_);
  }
  for (const auto& [deadline, batch] : batches)
    abort(batch, {Code::kCancelled, "transfer.close", "the engine was closed", ""});
  for (const auto& [deadline, batch] : batches) batch->completion().wait(kNever);
  for (const auto& [segment, peer] : peers) peer->close();
  Status status;
  if (server_) {
    for (const uint64_t base : registry_.bases()) {
      static_cast<void>(registry_.close(base));
      const Status revoked = server_->revoke(base, deadline_ns);
      if (status.is_ok()) status = revoked;
    }
    server_->close();
  }
  leave();
  return status;
}

Result<uint64_t> Engine::register_buffer(BufferSpec spec) {
  if (Status status = check_open(); !status.is_ok()) return status.error();
  return registry_.add(std::move(spec));
}

Status Engine::unregister(uint64_t base, int64_t deadline_ns) {
  if (Status status = check_open(); !status.is_ok()) return status;
  if (Status status = registry_.close(base); !status.is_ok()) return status;
  // Withdraw the buffer from peers first, whose writes are discarded from then on. Then only this
  // process's own transfers and copies are left to wait for.
  if (Status status = server_->revoke(base, deadline_ns); !status.is_ok()) return status;
  if (!registry_.wait_unpinned(base, deadline_ns))
    return {Code::kDeadline, "transfer.unregister",
            "transfers of the buffer are still running: wait for them or cancel them, then call "
            "again", "buffer"};
  registry_.remove(base);
  return {};
}

Result<uint64_t> Engine::open(const std::string& text, int64_t deadline_ns) {
  const Use use(*this);
  if (Status status = check_open(); !status.is_ok()) return status.error();
  constexpr size_t kMaxDebts = 1 << 20;
  if (const size_t count = options_.peer.fences->size(); count >= kMaxDebts)
    return Error{Code::kCapacity, "transfer.open",
                 std::to_string(count) + " connections with unconfirmed WRITEs wait for their peers "
                 "to confirm that they are closed", ""};
  Result<SocketAddress> address = parse_address(text);
  if (!address.is_ok()) return address.error();
  Peer::Owner owner{
      [this](int64_t due) { schedule(due); },
      [this](const std::shared_ptr<Batch>& batch, Error error) { abort(batch, std::move(error)); },
      [this](std::vector<Piece> pieces, std::shared_ptr<Mapping> mapping) {
        copy(std::move(pieces), std::move(mapping));
      }};
  auto peer = std::make_shared<Peer>(options_.peer, address.value(), loop_pointers_, owner);
  uint64_t segment;
  {
    // Add the peer to the timer before it connects, since the timer watches the handshake.
    const MutexLock lock(mutex_);
    if (is_closed_) return Error{Code::kConflict, "transfer.open", "the engine is closed", ""};
    segment = next_segment_++;
    peers_.emplace(segment, peer);
  }
  if (Status status = peer->open(deadline_ns); !status.is_ok()) {
    const MutexLock lock(mutex_);
    peers_.erase(segment);
    return status.error();
  }
  return segment;
}

Status Engine::close_segment(uint64_t segment) {
  const Use use(*this);
  if (Status status = check_open(); !status.is_ok()) return status;
  std::shared_ptr<Peer> peer;
  std::vector<std::shared_ptr<Batch>> to_end;
  {
    const MutexLock lock(mutex_);
    if (const auto file = files_.find(segment); file != files_.end()) {
      for (const auto& [deadline, batch] : watched_)
        if (std::find(batch->files().begin(), batch->files().end(), file->second) !=
            batch->files().end())
          to_end.push_back(batch);
      files_.erase(file);
    } else {
      const auto found = peers_.find(segment);
      if (found == peers_.end()) return not_found(segment);
      peer = std::move(found->second);
      peers_.erase(found);
    }
  }
  if (peer) peer->close();
  for (const auto& batch : to_end) {
    abort(batch, {Code::kCancelled, "transfer.close", "the file was closed", ""});
    batch->completion().wait(kNever);
  }
  return {};
}

Result<uint64_t> Engine::open_file(const FileOptions& options) {
  const Use use(*this);
  if (Status status = check_open(); !status.is_ok()) return status.error();
  Result<std::shared_ptr<File>> file = File::open(options);
  if (!file.is_ok()) return file.error();
  const MutexLock lock(mutex_);
  if (is_closed_) return Error{Code::kConflict, "transfer.open_file", "the engine is closed", ""};
  if (!file_io_) {
    Result<std::unique_ptr<FileIo>> io =
        FileIo::start(options_.file_backend, [this](const std::shared_ptr<Batch>& batch,
                                                    Error error) { abort(batch, std::move(error)); },
                      [this] { return faults(TransportKind::kFile); });
    if (!io.is_ok()) return io.error();
    file_io_ = std::move(io.value());
  }
  const uint64_t segment = next_segment_++;
  files_.emplace(segment, std::move(file.value()));
  return segment;
}

Result<std::shared_ptr<File>> Engine::find_file(uint64_t segment) {
  if (Status status = check_open(); !status.is_ok()) return status.error();
  const MutexLock lock(mutex_);
  const auto found = files_.find(segment);
  if (found == files_.end()) return not_found(segment).error();
  return found->second;
}

std::map<uint64_t, std::shared_ptr<Peer>> Engine::peers() const {
  const MutexLock lock(mutex_);
  return peers_;
}

std::shared_ptr<FaultPlan> Engine::set_faults(TransportKind kind,
                                              std::shared_ptr<FaultPlan> plan) {
  const MutexLock lock(mutex_);
  std::shared_ptr<FaultPlan> previous = std::exchange(faults_[kind], std::move(plan));
  if (!faults_[kind]) faults_.erase(kind);
  has_faults_.store(!faults_.empty());
  return previous;
}

std::shared_ptr<FaultPlan> Engine::faults(TransportKind kind) const {
  if (!has_faults_.load(std::memory_order_relaxed)) return nullptr;
  const MutexLock lock(mutex_);
  const auto found = faults_.find(kind);
  return found == faults_.end() ? nullptr : found->second;
}

void Engine::copy(std::vector<Piece> pieces, std::shared_ptr<Mapping> mapping) {
  if (pieces.empty()) return;
  if (mapping == own_segment_) fence_own();
  if (std::shared_ptr<FaultPlan> plan = faults(mapping->kind()))
    mapping = make_faulty_mapping(std::move(mapping), std::move(plan));
  copier_->submit(std::move(pieces), mapping);
}

// Settles the debts to this process itself, as a peer that reached itself over tcp.
void Engine::fence_own() {
  FenceLedger& fences = *options_.peer.fences;
  if (fences.is_empty()) return;
  const std::vector<FenceDebt> debts = fences.debts(epoch());
  server_->fence(debts);
  fences.settle(epoch(), debts);
}

std::vector<double> Engine::quota_rates() const {
  std::vector<double> rates;
  for (const auto& quota : options_.peer.quotas) rates.push_back(quota->rate());
  return rates;
}

std::pair<std::string, std::string> Engine::file_backend() const {
  const MutexLock lock(mutex_);
  if (!file_io_) return {};
  return {file_io_->has_ring() ? "io_uring" : "threads", file_io_->ring_refusal()};
}

BatchCounters Engine::batch_counters() const {
  const MutexLock lock(counters_mutex_);
  return batch_counters_;
}

void Engine::on_batch_end(const Batch& batch, const Status& status) {
  const MutexLock lock(counters_mutex_);
  --batch_counters_.num_running;
  if (status.is_ok()) {
    ++batch_counters_.num_done;
    batch_counters_.latencies.add(now_ns() - batch.begin_ns());
  } else {
    ++batch_counters_.num_failed[static_cast<size_t>(status.error().code)];
  }
}

Result<std::shared_ptr<Peer>> Engine::find_peer(uint64_t segment) {
  if (Status status = check_open(); !status.is_ok()) return status.error();
  const MutexLock lock(mutex_);
  const auto found = peers_.find(segment);
  if (found == peers_.end()) return not_found(segment).error();
  return found->second;
}

Result<Description> Engine::describe(uint64_t segment, int64_t deadline_ns) {
  const Use use(*this);
  if (segment == 0) {
    if (Status status = check_open(); !status.is_ok()) return status.error();
    return Description{options_.server.name, server_->addresses(), registry_.describe()};
  }
  if (Result<std::shared_ptr<File>> file = find_file(segment); file.is_ok())
    return Description{file.value()->path(), {},
                       {{0, file.value()->length(), true, file.value()->is_writable(), false,
                         "file", "file"}}};
  Result<std::shared_ptr<Peer>> peer = find_peer(segment);
  if (!peer.is_ok()) return peer.error();
  return peer.value()->describe(deadline_ns);
}

struct Engine::Target {
  std::shared_ptr<Peer> peer;
  std::shared_ptr<File> file;
};

Result<Engine::Target> Engine::find_target(uint64_t segment) {
  if (segment == 0) return Target{};
  const MutexLock lock(mutex_);
  if (const auto peer = peers_.find(segment); peer != peers_.end())
    return Target{peer->second, nullptr};
  const auto file = files_.find(segment);
  if (file == files_.end()) return not_found(segment).error();
  return Target{nullptr, file->second};
}

Status Engine::check_remote(const TransferRequest& request, const Target& target) {
  if (target.file) return target.file->check(request.op, request.offset, request.length);
  if (target.peer) {
    // Only the peer knows its buffers, so that here only impossible ranges are refused.
    if (request.offset + request.length >= request.offset) return {};
    return {Code::kConfig, "transfer.submit", "offset + length overflows", "offset"};
  }
  const auto access = request.op == Op::kRead ? Registry::Access::kRemoteRead
                                              : Registry::Access::kRemoteWrite;
  Result<Registry::Pin> pin = registry_.pin(request.offset, request.length, access);
  return pin.is_ok() ? Status() : Status(pin.error());
}

Result<std::shared_ptr<Batch>> Engine::make_batch(const std::vector<TransferRequest>& requests,
                                                  int64_t deadline_ns,
                                                  std::optional<TransportKind> only) {
  auto batch = std::make_shared<Batch>(
      requests.size(), deadline_ns, only,
      [this](const Batch& ended, const Status& status) { on_batch_end(ended, status); });
  LastPin last;
  Target target;
  std::optional<uint64_t> segment;
  for (size_t i = 0; i < requests.size(); ++i) {
    const TransferRequest& request = requests[i];
    TransferItem& item = batch->items()[i];
    // A range of length 0 must still begin inside the buffer.
    const uint64_t needed = std::max<uint64_t>(request.length, 1);
    const bool is_held = last.data != nullptr && last.base == request.buffer &&
                         last.op == request.op && request.local_offset < last.length &&
                         needed <= last.length - request.local_offset;
    if (!is_held) {
      const auto access =
          request.op == Op::kRead ? Registry::Access::kLocalWrite : Registry::Access::kLocalRead;
      const uint64_t begin = request.buffer + request.local_offset;
      if (begin < request.buffer)
        return Error{Code::kConfig, "transfer.submit", "local_offset overflows", "local_offset"};
      Result<Registry::Pin> pin = registry_.pin(begin, needed, access);
      if (!pin.is_ok()) return pin.error();
      const Registry::Entry& entry = pin.value().entry();
      if (entry.base != request.buffer)
        return Error{Code::kConfig, "transfer.submit", "local_offset is beyond the buffer",
                     "local_offset"};
      const auto location = locations_.find(entry.spec.location);
      last = {entry.base, request.op, entry.spec.data, entry.spec.length,
              location == locations_.end() ? 0 : location->second};
      batch->hold(std::move(pin.value()));
    }
    if (segment != request.segment) {
      Result<Target> found = find_target(request.segment);
      if (!found.is_ok()) return found.error();
      target = std::move(found.value());
      segment = request.segment;
      batch->hold(target.peer, target.file);
    }
    if (Status status = check_remote(request, target); !status.is_ok()) return status.error();
    if (only && (*only == TransportKind::kFile) != (target.file != nullptr))
      return Error{Code::kUnsupported, "transfer.submit",
                   "a file is reached by the transport 'file', and nothing else is", "transport"};
    item.op = request.op;
    item.local = last.data + request.local_offset;
    item.location = last.location;
    item.peer = target.peer.get();
    item.file = target.file.get();
    item.counters = target.peer ? &target.peer->counters() : &counters_;
    item.offset = request.offset;
    item.length = request.length;
  }
  return batch;
}

namespace {

// Merges transfers that continue the previous one at both ends into one piece.
std::vector<Piece> merge_runs(const std::shared_ptr<Batch>& batch) {
  std::vector<Piece> runs;
  const std::vector<TransferItem>& items = batch->items();
  for (size_t i = 0; i < items.size(); ++i) {
    const TransferItem& item = items[i];
    if (item.length == 0) continue;
    if (!runs.empty()) {
      Piece& run = runs.back();
      const TransferItem& first = run.transfer();
      if (first.op == item.op && first.peer == item.peer && first.file == item.file &&
          first.local + run.length == item.local && first.offset + run.length == item.offset) {
        run.total = run.length += item.length;
        continue;
      }
    }
    runs.push_back({batch, i, 0, item.length, item.length});
  }
  return runs;
}

}  // namespace

Result<std::shared_ptr<Batch>> Engine::submit(const std::vector<TransferRequest>& requests,
                                              int64_t deadline_ns,
                                              std::optional<TransportKind> only) {
  const Use use(*this);
  if (Status status = check_open(); !status.is_ok()) return status.error();
  Result<std::shared_ptr<Batch>> made = make_batch(requests, deadline_ns, only);
  if (!made.is_ok()) return made;
  const std::shared_ptr<Batch>& batch = made.value();
  std::map<Peer*, std::vector<Piece>> by_peer;
  std::vector<Piece> inside;
  std::vector<Piece> to_files;
  for (Piece& run : merge_runs(batch)) {
    const TransferItem& item = run.transfer();
    (item.peer ? by_peer[item.peer] : item.file ? to_files : inside).push_back(std::move(run));
  }
  {
    const MutexLock lock(counters_mutex_);
    ++batch_counters_.num_running;
  }
  if (!watch(batch)) {
    abort(batch, closed_error());
    return closed_error();
  }
  batch->start();
  for (auto& [peer, pieces] : by_peer) peer->submit(std::move(pieces));
  for (Piece& piece : to_files) file_io_->submit(std::move(piece));
  copy(std::move(inside), own_segment_);
  return batch;
}

void Engine::abort(const std::shared_ptr<Batch>& batch, Error error) {
  if (!batch->begin_end()) return;
  for (const auto& peer : batch->peers()) peer->drop(*batch);
  copier_->drop(*batch);
  if (!batch->files().empty()) file_io_->drop(*batch);
  batch->finish(std::move(error));
}

void Engine::cancel(const std::shared_ptr<Batch>& batch) {
  if (is_forked()) return;
  const Use use(*this);
  if (!use) return;  // All batches have ended.
  abort(batch, {Code::kCancelled, "transfer.cancel", "the batch was cancelled", ""});
  batch->completion().wait(kNever);  // Another may be ending it; that takes as long as a system call.
}

// One for each thread: what a thread has learnt about polling on this machine outlasts the call.
AdaptiveSpin& Engine::spin_of_thread() const {
  thread_local AdaptiveSpin spin(0);
  if (spin.limit_ns() != options_.spin_ns) spin = AdaptiveSpin(options_.spin_ns);
  return spin;
}

bool Engine::await(Completion& completion, int64_t deadline_ns) {
  if (completion.is_done()) return true;
  AdaptiveSpin& spin = spin_of_thread();
  const bool is_in_time = await(completion, deadline_ns, spin);
  if (is_in_time) spin.came();
  return is_in_time;
}

bool Engine::await(Completion& completion, int64_t deadline_ns, AdaptiveSpin& spin) {
  const auto is_done = [&] { return completion.is_done(); };
  std::vector<EventLoop*> led;
  for (EventLoop* loop : loop_pointers_)
    if (loop->begin_lead()) led.push_back(loop);
  if (!led.empty()) {
    const auto poll = [&] {
      for (EventLoop* loop : led) loop->poll_answers();
      return is_done();
    };
    if (options_.spin_ns > 0) spin.wait(poll);
    // A thread can sleep in one event loop only. With several, their own threads handle the
    // answers.
    if (led.size() == loop_pointers_.size() && led.size() == 1) {
      completion.set_leader(led[0]);
      led[0]->sleep_until(is_done, deadline_ns);
      completion.set_leader(nullptr);
    }
    for (EventLoop* loop : led) loop->end_lead();
    if (is_done()) return true;
  }
  for (EventLoop* loop : loop_pointers_) loop->begin_follow();
  const bool is_in_time = completion.wait(deadline_ns);
  for (EventLoop* loop : loop_pointers_) loop->end_follow();
  return is_in_time;
}

Result<int> Engine::completion_fd(const std::shared_ptr<Batch>& batch) {
  if (is_forked()) return check_open().error();
  const Use use(*this);
  if (use) batch->completion().follow(loop_pointers_);
  return batch->completion_fd();
}

Status Engine::wait(const std::shared_ptr<Batch>& batch, int64_t deadline_ns) {
  if (is_forked()) return check_open();
  const Use use(*this);
  if (!use) {
    batch->completion().wait(kNever);  // All batches have ended, or do so as the last thread ends.
    return batch->status();
  }
  if (!batch->is_finished()) copier_->help(*batch);
  if (!await(batch->completion(), deadline_ns)) {
    abort(batch, {Code::kDeadline, "transfer.wait", "the transfer did not end in time", ""});
    batch->completion().wait(kNever);
  }
  unwatch(*batch);
  return batch->status();
}

Result<std::string> Engine::call(uint64_t segment, std::string payload, int64_t deadline_ns) {
  auto begun = begin_call(segment, std::move(payload), nullptr, 0);
  if (!begun.is_ok()) return begun.error();
  return await_call(*begun.value().peer, begun.value().call, deadline_ns);
}

Result<Engine::BegunCall> Engine::begin_call(uint64_t segment, std::string payload,
                                             std::shared_ptr<CallInbox> inbox, uint64_t tag) {
  const Use use(*this);
  Result<std::shared_ptr<Peer>> peer = find_peer(segment);
  if (!peer.is_ok()) return peer.error();
  auto begun = peer.value()->begin_call(std::move(payload), std::move(inbox), tag);
  if (!begun.is_ok()) return begun.error();
  return BegunCall{std::move(peer.value()), std::move(begun.value())};
}

Result<std::string> Engine::await_call(Peer& peer, const std::shared_ptr<PendingCall>& call,
                                       int64_t deadline_ns) {
  if (is_forked()) return check_open().error();
  const Use use(*this);
  // Without threads all calls have ended.
  if (use && !await(call->completion(), deadline_ns))
    peer.abandon_call(call, {Code::kDeadline, "transfer.call",
                             "no answer in time: executed once or not at all", ""});
  return call->take_answer();
}

Status Engine::serve_calls() {
  if (Status status = check_open(); !status.is_ok()) return status;
  return server_->calls()->begin_serving();
}

std::optional<std::vector<std::shared_ptr<IncomingCall>>> Engine::wait_calls(size_t max) {
  const Use use(*this);
  CallQueue& calls = *server_->calls();
  if (!use) return std::nullopt;
  while (true) {
    if (!calls.is_ready()) {
      AdaptiveSpin& spin = spin_of_thread();
      const auto poll = [&] {
        for (EventLoop* loop : loop_pointers_) loop->poll_requests();
        return calls.is_ready();
      };
      if (options_.spin_ns > 0) spin.wait(poll);
      calls.wait();
      spin.came();
    }
    auto taken = calls.take(max);
    if (!taken || !taken->empty()) return taken;  // Empty: their callers were gone.
  }
}

bool Engine::poll_requests(const std::vector<std::shared_ptr<Engine>>& engines, int fd,
                           int64_t limit_ns) {
  std::deque<Use> uses;
  std::vector<EventLoop*> loops;
  AdaptiveSpin* spin = nullptr;
  for (const auto& engine : engines) {
    if (engine->is_forked() || !uses.emplace_back(*engine)) continue;
    loops.insert(loops.end(), engine->loop_pointers_.begin(), engine->loop_pointers_.end());
    if (engine->options_.spin_ns > 0) spin = &engine->spin_of_thread();
  }
  if (spin == nullptr) return false;
  const int64_t deadline = now_ns() + limit_ns;
  bool is_readable = false;
  const auto poll = [&] {
    for (EventLoop* loop : loops) loop->poll_requests();
    pollfd events{.fd = fd, .events = POLLIN, .revents = 0};
    is_readable = ::poll(&events, 1, 0) > 0;
    return is_readable || now_ns() >= deadline;
  };
  spin->wait(poll);
  return is_readable;
}

Status Engine::notify(uint64_t segment, const std::string& name, const std::string& payload,
                      int64_t deadline_ns) {
  const Use use(*this);
  Result<std::shared_ptr<Peer>> peer = find_peer(segment);
  if (!peer.is_ok()) return peer.error();
  return peer.value()->notify(name, payload, deadline_ns);
}

Result<std::vector<Notification>> Engine::take_notifications(int64_t deadline_ns) {
  if (Status status = check_open(); !status.is_ok()) return status.error();
  return server_->take_notifications(deadline_ns);
}

const std::vector<std::string>& Engine::addresses() const { return server_->addresses(); }

// --- Time -----------------------------------------------------------------------------------------

bool Engine::watch(const std::shared_ptr<Batch>& batch) {
  {
    const MutexLock lock(mutex_);
    if (is_closed_) return false;
    watched_.emplace(batch->deadline_ns(), batch);
    if (watched_.size() > sweep_size_) {
      // Remove finished batches that nobody waits for before their deadlines.
      std::erase_if(watched_, [](const auto& item) { return item.second->is_finished(); });
      sweep_size_ = std::max<size_t>(1024, 2 * watched_.size());
    }
  }
  schedule(batch->deadline_ns());
  return true;
}

void Engine::unwatch(const Batch& batch) {
  const MutexLock lock(mutex_);
  const auto [begin, end] = watched_.equal_range(batch.deadline_ns());
  for (auto item = begin; item != end; ++item) {
    if (item->second.get() != &batch) continue;
    watched_.erase(item);
    return;
  }
}

void Engine::schedule(int64_t due_ns) {
  const MutexLock lock(timer_mutex_);
  if (due_ns >= timer_due_ns_) return;
  timer_due_ns_ = std::max(due_ns, now_ns());  // What is due already is not late yet.
  timer_changed_.notify_one();
}

int64_t Engine::tick(int64_t now, int64_t late_ns) {
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<std::shared_ptr<Batch>> late;
  int64_t due = kNever;
  {
    const MutexLock lock(mutex_);
    for (const auto& [segment, peer] : peers_) peers.push_back(peer);
    auto item = watched_.begin();
    for (; item != watched_.end() && item->first <= now; ++item) late.push_back(item->second);
    if (item != watched_.end()) due = item->first;
    watched_.erase(watched_.begin(), item);
  }
  for (const auto& batch : late)
    abort(batch, {Code::kDeadline, "transfer.watch", "the transfer did not end in time", ""});
  for (const auto& peer : peers) due = std::min(due, peer->tick(now, late_ns));
  if (server_) due = std::min(due, server_->tick(now));
  return due;
}

void Engine::run_timer() {
  MutexLock lock(timer_mutex_);
  while (!is_timer_stopping_) {
    const int64_t now = now_ns();
    if (timer_due_ns_ > now) {
      // Limit the wait: a far deadline is as good as none, and wait_until must not overflow.
      constexpr int64_t kFarNs = 3'600'000'000'000;
      const int64_t until = std::min(timer_due_ns_, now + kFarNs);
      timer_changed_.wait_until(
          lock, std::chrono::steady_clock::time_point{std::chrono::nanoseconds(until)},
          [&]() REQUIRES(timer_mutex_) { return is_timer_stopping_ || timer_due_ns_ < until; });
      continue;
    }
    // Events that are scheduled during the tick are earlier than kNever, so that they are not
    // missed.
    const int64_t late_ns = now - std::exchange(timer_due_ns_, kNever);
    lock.unlock();
    const int64_t due = tick(now, late_ns);
    lock.lock();
    timer_due_ns_ = std::min(timer_due_ns_, std::max(due, now_ns()));
  }
}

}  // namespace tandem::transfer
