// Goal: the engine's threads touch memory only while they may; run under ASan, UBSan and TSan.
// Method: engines in one process, several threads that submit, cancel, unregister and close at once.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/threads/idle_spin.h"
#include "base/test.h"
#include "transfer/engine/engine.h"

namespace tandem::transfer {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
int64_t in_seconds(int64_t seconds) { return now_ns() + seconds * kSecond; }

EngineOptions make_options(std::vector<TransportKind> transports, bool has_checksum = false) {
  EngineOptions options;
  options.server.name = "engine";
  options.server.secret = "a secret of the test cluster";
  options.server.listen = {"127.0.0.1:0"};
  options.peer.transports = std::move(transports);
  options.peer.lanes = 2;
  options.peer.has_checksum = has_checksum;
  options.io_threads = 2;
  options.copy_threads = 2;
  return options;
}

const std::vector<TransportKind> kAll = {TransportKind::kShm, TransportKind::kCma,
                                         TransportKind::kTcp};

uint64_t add(Engine& engine, std::vector<uint8_t>& bytes) {
  return engine.register_buffer({bytes.data(), bytes.size(), ""}).value();
}

TEST(engine_moves_bytes_on_every_transport) {
  const auto giver = Engine::create(make_options(kAll)).value();
  const auto memory = SharedMemory::allocate(1 << 20).value();
  BufferSpec spec{memory->data(), memory->size(), "shared"};
  spec.memory = memory;
  const uint64_t remote = giver->register_buffer(std::move(spec)).value();
  std::vector<uint8_t> data(1 << 20), back(1 << 20);
  std::mt19937 random(1);
  for (const TransportKind kind : kAll) {
    const auto taker = Engine::create(make_options({kind}, true)).value();
    const uint64_t segment = taker->open(giver->addresses()[0], in_seconds(20)).value();
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
    const uint64_t local = add(*taker, data), target = add(*taker, back);
    auto write = taker->submit({{Op::kWrite, local, 0, segment, remote, data.size()}},
                                     in_seconds(20), kind);
    CHECK(taker->wait(write.value(), in_seconds(20)).is_ok());
    auto read = taker->submit({{Op::kRead, target, 0, segment, remote, data.size()}},
                              in_seconds(20), kind);
    CHECK(taker->wait(read.value(), in_seconds(20)).is_ok());
    CHECK(data == back);
  }
}

TEST(engine_survives_cancel_unregister_and_close_under_fire) {
  std::mt19937 seeds(2);
  for (int round = 0; round < 4; ++round) {
    std::vector<uint8_t> remote_bytes(1 << 20);  // Longer than the giver that serves it.
    const auto giver = Engine::create(make_options(kAll)).value();
    const auto taker = Engine::create(make_options(kAll)).value();
    const uint64_t segment = taker->open(giver->addresses()[0], in_seconds(20)).value();
    std::atomic<uint64_t> remote{add(*giver, remote_bytes)};
    std::atomic<bool> is_over{false};
    std::atomic<int> num_ended{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t, seed = seeds()] {
        // Each thread has its own part of the buffer, since overlapping transfers would be a race
        // of the caller.
        constexpr uint64_t kPart = 256 << 10, kRest = 1000;
        const uint64_t begin = static_cast<uint64_t>(t) * 300'000;
        std::mt19937 random(seed);
        while (!is_over.load()) {
          std::vector<uint8_t> bytes(kPart + kRest);
          const uint64_t local = taker->register_buffer({bytes.data(), bytes.size(), ""}).value();
          const Op op = random() % 2 ? Op::kRead : Op::kWrite;
          const auto only = random() % 2 ? std::optional(kAll[random() % 3]) : std::nullopt;
          const uint64_t far = remote.load() + begin;
          auto batch = taker->submit({{op, local, 0, segment, far, kPart},
                                      {op, local, kPart, segment, far + kPart, kRest}},
                                     in_seconds(20), only);
          if (batch.is_ok()) {
            if (random() % 3 == 0) taker->cancel(batch.value());
            static_cast<void>(taker->wait(batch.value(), in_seconds(random() % 2 ? 20 : 0)));
          }
          CHECK(taker->unregister(local, in_seconds(20)).is_ok());
          // The vector is destroyed here, so that a late byte would be a use after free.
          num_ended.fetch_add(1);
        }
      });
    }
    for (int swap = 0; swap < 5; ++swap) {
      const int target = num_ended.load() + 5;
      const int64_t limit = in_seconds(30);
      while (num_ended.load() < target && now_ns() < limit) std::this_thread::yield();
      const uint64_t old = remote.load();
      CHECK(giver->unregister(old, in_seconds(20)).is_ok());
      std::vector<uint8_t>(1 << 20).swap(remote_bytes);
      remote.store(add(*giver, remote_bytes));
    }
    is_over.store(true);
    for (std::thread& thread : threads) thread.join();
    CHECK(num_ended.load() >= 25);
    CHECK((round % 2 ? giver : taker)->close(in_seconds(20)).is_ok());
  }
}

TEST(engine_close_ends_what_runs) {
  // The buffers live longer than the serving engine, which may still serve requests that a client
  // made before it closed.
  std::vector<uint8_t> remote(8 << 20), local(8 << 20);
  const auto giver = Engine::create(make_options({TransportKind::kTcp})).value();
  const uint64_t base = add(*giver, remote);
  for (int round = 0; round < 4; ++round) {
    const auto taker = Engine::create(make_options({TransportKind::kTcp})).value();
    const uint64_t segment = taker->open(giver->addresses()[0], in_seconds(20)).value();
    const uint64_t own = add(*taker, local);
    std::vector<std::shared_ptr<Batch>> batches;
    for (int i = 0; i < 4; ++i)
      batches.push_back(taker->submit({{Op::kRead, own, 0, segment, base, local.size()}},
                                      in_seconds(20), std::nullopt).value());
    CHECK(taker->close(in_seconds(20)).is_ok());
    std::memset(local.data(), round, local.size());
    for (const auto& batch : batches) CHECK(batch->is_finished());
    CHECK(std::all_of(local.begin(), local.end(), [&](uint8_t b) { return b == round; }));
  }
}

TEST(engine_ends_its_threads_with_the_last_call) {
  std::vector<uint8_t> remote(4 << 20);
  const auto giver = Engine::create(make_options(kAll)).value();
  const uint64_t base = add(*giver, remote);
  std::mt19937 seeds(4);
  for (int round = 0; round < 6; ++round) {
    const auto taker = Engine::create(make_options(kAll)).value();
    std::atomic<int> num_ended{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t, seed = seeds()] {
        std::mt19937 random(seed);
        std::vector<uint8_t> local(1 << 20);
        Result<uint64_t> own = taker->register_buffer({local.data(), local.size(), ""});
        while (own.is_ok()) {
          Result<uint64_t> segment = taker->open(giver->addresses()[0], in_seconds(20));
          if (!segment.is_ok()) break;
          const uint64_t far = base + static_cast<uint64_t>(t) * local.size();
          auto batch = taker->submit({{Op::kWrite, own.value(), 0, segment.value(), far, local.size()}},
                                     in_seconds(20), kAll[random() % 3]);
          if (!batch.is_ok()) break;
          if (random() % 3 == 0) taker->cancel(batch.value());
          static_cast<void>(taker->wait(batch.value(), in_seconds(20)));
          CHECK(batch.value()->is_finished());
          static_cast<void>(taker->close_segment(segment.value()));
          num_ended.fetch_add(1);
        }
      });
    }
    const int64_t limit = in_seconds(30);
    while (num_ended.load() < 4 + round && now_ns() < limit) std::this_thread::yield();
    CHECK(taker->close(in_seconds(20)).is_ok());
    for (std::thread& thread : threads) thread.join();
    CHECK(num_ended.load() >= 4 + round);
    CHECK(!taker->open(giver->addresses()[0], in_seconds(1)).is_ok());
  }
}

TEST(engine_answers_calls_of_many_threads_while_connections_close) {
  std::mt19937 seeds(3);
  for (int round = 0; round < 3; ++round) {
    const auto giver = Engine::create(make_options(kAll)).value();
    CHECK(giver->serve_calls().is_ok());
    CHECK(giver->serve_calls().error().code == Code::kConflict);
    std::atomic<int> num_executed{0};
    std::thread server([&] {
      std::vector<std::shared_ptr<IncomingCall>> kept;
      for (;;) {
        auto calls = giver->wait_calls(16);
        if (!calls) break;
        for (auto& call : *calls) {
          num_executed.fetch_add(1);
          // Answer some calls now, keep some for later, and drop the others, which answers them by
          // their destruction.
          if (call->payload().back() % 4 == 0) {
            kept.push_back(std::move(call));
          } else if (const auto connection = call->answer(call->payload() + "!")) {
            connection->flush();
          }
        }
        if (kept.size() > 3) kept.clear();
      }
    });
    const auto taker = Engine::create(make_options(kAll)).value();
    std::atomic<int> num_answered{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, seed = seeds()] {
        std::mt19937 random(seed);
        uint64_t segment = taker->open(giver->addresses()[0], in_seconds(20)).value();
        for (int i = 0; i < 200; ++i) {
          const std::string payload(1 + random() % 3000, static_cast<char>(random()));
          const int64_t deadline = random() % 8 ? now_ns() + kSecond / 10 : now_ns();
          Result<std::string> answer = taker->call(segment, payload, deadline);
          if (answer.is_ok()) {
            CHECK_EQ(answer.value(), payload + "!");
            num_answered.fetch_add(1);
          } else {
            const Code code = answer.error().code;
            CHECK(code == Code::kDeadline || code == Code::kInternal);
          }
          if (random() % 50 == 0) {
            CHECK(taker->close_segment(segment).is_ok());
            segment = taker->open(giver->addresses()[0], in_seconds(20)).value();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(num_answered.load() > 100);
    CHECK(num_executed.load() >= num_answered.load());
    CHECK((round % 2 ? giver : taker)->close(in_seconds(20)).is_ok());
    CHECK(giver->close(in_seconds(20)).is_ok());
    server.join();
  }
}

}  // namespace
}  // namespace tandem::transfer
