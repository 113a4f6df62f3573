// Goal: file transfers touch memory only while they may, whoever cancels or closes meanwhile; and
// shares of a NIC follow the weights. Run under ASan, UBSan and TSan. Method: several threads with
// real files, io_uring and threads; the board of shares with the test's own clock.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/threads/idle_spin.h"
#include "base/test.h"
#include "transfer/engine/engine.h"
#include "transfer/rails/nic_quota.h"
#include "transfer/memory/process_id.h"

namespace tandem::transfer {
namespace {

int64_t deadline_in(int64_t seconds) { return now_ns() + seconds * 1'000'000'000; }

// A folder that is removed with its files.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/tandem-file-test-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() {
    for (const std::string& name : names_) unlink(name.c_str());
    rmdir(path_.c_str());
  }
  std::string name(const std::string& leaf) {
    names_.push_back(path_ + "/" + leaf);
    return names_.back();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> names_;
};

void hammer(FileBackend backend) {
  Folder folder;
  EngineOptions options;
  options.file_backend = backend;
  Result<std::shared_ptr<Engine>> made = Engine::create(std::move(options));
  CHECK(made.is_ok());
  const auto engine = made.value();
  constexpr uint64_t kBytes = 3 << 20;
  Result<uint64_t> file = engine->open_file({folder.name("f"), true, kBytes, true});
  if (!file.is_ok()) {
    // This kernel or sandbox has no io_uring; the other backend is tested.
    CHECK(backend == FileBackend::kIoUring && file.error().code == Code::kUnsupported);
    return;
  }
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int round = 0; round < 20; ++round) {
        std::vector<uint8_t> bytes(kBytes, static_cast<uint8_t>(round));
        const uint64_t buffer =
            engine->register_buffer({bytes.data(), bytes.size(), ""}).value();
        const Op op = random() % 2 ? Op::kRead : Op::kWrite;
        const uint64_t at = random() % (1 << 20);
        const uint64_t segment = file.value();
        auto batch = engine->submit({{op, buffer, at, segment, at, kBytes - at},
                                     {op, buffer, 0, segment, 0, at / 2}},
                                    deadline_in(20), TransportKind::kFile);
        if (!batch.is_ok()) {
          ++num_wrong;
          continue;
        }
        if (random() % 3 == 0)
          engine->cancel(batch.value());
        else if (!engine->wait(batch.value(), deadline_in(20)).is_ok())
          ++num_wrong;
        const std::vector<uint8_t> seen = bytes;
        if (!engine->unregister(buffer, deadline_in(20)).is_ok()) ++num_wrong;
        num_wrong += bytes != seen;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_wrong.load(), 0);
  // Close the engine half-way through: running batches end.
  std::vector<uint8_t> bytes(kBytes);
  const uint64_t buffer = engine->register_buffer({bytes.data(), bytes.size(), ""}).value();
  std::vector<std::shared_ptr<Batch>> batches;
  for (int i = 0; i < 4; ++i)
    batches.push_back(engine->submit({{Op::kWrite, buffer, 0, file.value(), 0, kBytes}},
                                     deadline_in(20), std::nullopt)
                          .value());
  CHECK(engine->close(deadline_in(20)).is_ok());
  for (const auto& batch : batches) CHECK(batch->is_finished());
}

TEST(files_by_threads_under_fire) { hammer(FileBackend::kThreads); }
TEST(files_by_io_uring_under_fire) { hammer(FileBackend::kIoUring); }

TEST(a_failing_file_ends_its_batches_once) {
  for (const FileBackend backend : {FileBackend::kThreads, FileBackend::kAuto}) {
    Folder folder;
    EngineOptions options;
    options.file_backend = backend;
    const auto engine = Engine::create(std::move(options)).value();
    constexpr uint64_t kBytes = 8 << 20;
    const uint64_t file = engine->open_file({folder.name("f"), true, kBytes, false}).value();
    std::vector<uint8_t> bytes(kBytes);
    const uint64_t buffer = engine->register_buffer({bytes.data(), bytes.size(), ""}).value();
    engine->set_faults(TransportKind::kFile,
                       std::make_shared<FaultPlan>(3, FaultRates{.drop = 0.5}));
    for (int i = 0; i < 20; ++i) {
      const auto batch =
          engine->submit({{Op::kRead, buffer, 0, file, 0, kBytes}}, deadline_in(20), std::nullopt)
              .value();
      const Status status = engine->wait(batch, deadline_in(20));
      CHECK(status.is_ok() || status.error().code == Code::kInternal);
    }
    engine->set_faults(TransportKind::kFile, nullptr);
    const auto batch =
        engine->submit({{Op::kRead, buffer, 0, file, 0, kBytes}}, deadline_in(20), std::nullopt)
            .value();
    CHECK(engine->wait(batch, deadline_in(20)).is_ok());
  }
}

// Two processes on a NIC of a hundred megabytes a second, with a clock that the test moves.
class ToyNic {
 public:
  // `late_ns`: delay with which a limited process wakes on a busy machine.
  explicit ToyNic(double rate, int64_t late_ns = 0) : rate_(rate), late_ns_(late_ns) {}

  // Both processes send whenever they may; returns what each moved in the second half.
  std::pair<double, double> run(NicQuota* a, NicQuota* b, int64_t duration_ns) {
    double moved[2] = {0, 0};
    const int64_t begin = now_ns_;
    constexpr uint64_t kSlice = 64 << 10;
    while (now_ns_ < begin + duration_ns) {
      NicQuota* quotas[2] = {a, b};
      // The NIC serves the processes that may send in turn; if none may, it idles for a moment.
      bool is_idle = true;
      for (int i = 0; i < 2; ++i) {
        if (quotas[i] == nullptr || now_ns_ < free_ns_[i]) continue;
        free_ns_[i] = quotas[i]->spend(kSlice, now_ns_);
        if (free_ns_[i] > now_ns_) free_ns_[i] += late_ns_;
        now_ns_ += static_cast<int64_t>(kSlice / rate_ * 1e9);
        quotas[i]->add_moved(kSlice, now_ns_);
        quotas[i]->note_backlog(now_ns_);
        if (now_ns_ > begin + duration_ns / 2) moved[i] += kSlice;
        is_idle = false;
      }
      if (is_idle) now_ns_ += 100'000;
    }
    return {moved[0], moved[1]};
  }

 private:
  const double rate_;
  const int64_t late_ns_;
  int64_t now_ns_ = 1'000'000'000;
  int64_t free_ns_[2] = {0, 0};
};

TEST(shares_of_a_nic_follow_weights) {
  Folder folder;
  const ProcessId process = read_own_process();
  const std::string board = "test";
  folder.name("tandem-" + std::to_string(getuid()) + "-" + board);
  for (const double weight : {1.0, 3.0, 10.0}) {
    auto a = NicQuota::join(board, weight, process, folder.path()).value();
    auto b = NicQuota::join(board, 1.0, process, folder.path()).value();
    ToyNic nic(1e8);
    const auto [of_a, of_b] = nic.run(a.get(), b.get(), 4'000'000'000);
    const double part = of_a / (of_a + of_b);
    CHECK(part > weight / (weight + 1) - 0.03 && part < weight / (weight + 1) + 0.03);
    CHECK(of_a + of_b > 0.95 * 2e8);  // Two seconds of the NIC.
    // When one process leaves, the other is no longer limited, within 100 ms.
    a.reset();
    const auto [none, all] = nic.run(nullptr, b.get(), 100'000'000);
    CHECK_EQ(none, 0.0);
    CHECK(all > 0.95 * 5e6);
    CHECK(b->rate() > 1e300);
  }
}

TEST(processes_that_wake_late_do_not_hold_each_other_down) {
  Folder folder;
  folder.name("tandem-" + std::to_string(getuid()) + "-late");
  const ProcessId process = read_own_process();
  constexpr double kRate = 2.5e7;
  for (const int64_t late_ms : {5, 15, 30}) {
    auto a = NicQuota::join("late", 3.0, process, folder.path()).value();
    auto b = NicQuota::join("late", 1.0, process, folder.path()).value();
    ToyNic nic(kRate, late_ms * 1'000'000);
    const auto [of_a, of_b] = nic.run(a.get(), b.get(), 8'000'000'000);
    CHECK(of_a + of_b > 0.9 * 4 * kRate);
    CHECK(of_a / (of_a + of_b) > 0.7 && of_a / (of_a + of_b) < 0.8);
  }
}

TEST(a_board_refuses_what_is_no_name) {
  const ProcessId process = read_own_process();
  for (const char* name : {"", "../x", "a/b", ".x"})
    CHECK(!NicQuota::join(name, 1.0, process, "/tmp").is_ok());
  CHECK(!NicQuota::join("x", 0.0, process, "/tmp").is_ok());
}

TEST(a_board_has_room_for_those_who_live) {
  Folder folder;
  folder.name("tandem-" + std::to_string(getuid()) + "-b");
  ProcessId dead = read_own_process();
  dead.start_time += 1;  // A pid that was given to another since.
  const ProcessId own = read_own_process();
  std::vector<std::shared_ptr<NicQuota>> held;
  for (int i = 0; i < 64; ++i) {
    auto quota = NicQuota::join("b", 1.0, i % 2 ? own : dead, folder.path());
    CHECK(quota.is_ok());
    held.push_back(quota.value());
  }
  for (int i = 0; i < 32; ++i) CHECK(NicQuota::join("b", 1.0, own, folder.path()).is_ok());
}

}  // namespace
}  // namespace tandem::transfer
