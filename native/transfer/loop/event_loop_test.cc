// Goal: an answer is handled by the thread that waits for it, or by the loop's own thread without a
// waiter; requests are never delayed by either. Method: pipes in place of sockets, bounded waits.
#include "transfer/loop/event_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include "base/test.h"
#include "transfer/engine/completion.h"

namespace tandem::transfer {
namespace {

constexpr int64_t kBoundNs = 20'000'000'000;

// A pipe that counts its messages and remembers the thread that read last.
class Mailbox : public EventHandler {
 public:
  Mailbox() { CHECK(pipe2(fds_.data(), O_NONBLOCK | O_CLOEXEC) == 0); }
  ~Mailbox() override {
    for (const int fd : fds_) close(fd);
  }
  void on_events(uint32_t) override {
    char byte;
    while (read(fds_[0], &byte, 1) == 1) {
      reader.store(std::this_thread::get_id());
      num_read.fetch_add(1);
    }
  }
  void put() {
    const char byte = 0;
    CHECK(write(fds_[1], &byte, 1) == 1);
  }
  int fd() const { return fds_[0]; }
  bool wait(int count) const {
    const int64_t end = now_ns() + kBoundNs;
    while (num_read.load() < count && now_ns() < end) std::this_thread::yield();
    return num_read.load() >= count;
  }

  std::atomic<int> num_read{0};
  std::atomic<std::thread::id> reader{};

 private:
  std::array<int, 2> fds_{-1, -1};
};

struct World {
  explicit World(int64_t spin_ns) : loop(std::move(EventLoop::start(spin_ns).value())) {
    CHECK(loop->add(answers->fd(), EPOLLIN, answers, EventLoop::Kind::kAnswers).is_ok());
    CHECK(loop->add(requests->fd(), EPOLLIN, requests, EventLoop::Kind::kRequests).is_ok());
  }
  // Waits for an answer as an engine does.
  void lead_one() {
    const int wanted = answers->num_read.load() + 1;
    CHECK(loop->begin_lead());
    answers->put();
    loop->sleep_until([&] { return answers->num_read.load() >= wanted; }, now_ns() + kBoundNs);
    loop->end_lead();
    CHECK_EQ(answers->num_read.load(), wanted);
    CHECK(answers->reader.load() == std::this_thread::get_id());
  }

  std::unique_ptr<EventLoop> loop;
  std::shared_ptr<Mailbox> answers = std::make_shared<Mailbox>();
  std::shared_ptr<Mailbox> requests = std::make_shared<Mailbox>();
};

TEST(event_loop_leader_handles_its_answers) {
  for (const int64_t spin_ns : {0, 50'000}) {
    World world(spin_ns);
    for (int i = 0; i < 200; ++i) world.lead_one();
  }
}

TEST(event_loop_thread_handles_what_nobody_waits_for) {
  World world(0);
  world.answers->put();
  CHECK(world.answers->wait(1));
  CHECK(world.answers->reader.load() != std::this_thread::get_id());
  // After waits that follow each other the gate is shut for a while, and opens again.
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 5; ++i) world.lead_one();
    const int before = world.answers->num_read.load();
    world.answers->put();
    CHECK(world.answers->wait(before + 1));
    CHECK(world.answers->reader.load() != std::this_thread::get_id());
  }
}

TEST(event_loop_helper_leaves_the_bell_to_the_thread) {
  // Two short waits shut the gate and ring for the thread, which opens it by the clock. A thread
  // that polls for requests meanwhile must not take the bell, or nobody would open the gate.
  World world(0);
  std::atomic<bool> is_over{false};
  std::thread helper([&] {
    while (!is_over.load()) world.loop->poll_requests();
  });
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 2; ++i) {
      const int wanted = world.answers->num_read.load() + 1;
      CHECK(world.loop->begin_lead());
      world.answers->put();
      const int64_t end = now_ns() + kBoundNs;
      while (world.answers->num_read.load() < wanted && now_ns() < end) world.loop->poll_answers();
      world.loop->end_lead();
      CHECK_EQ(world.answers->num_read.load(), wanted);
    }
    const int before = world.answers->num_read.load();
    world.answers->put();
    CHECK(world.answers->wait(before + 1));
  }
  is_over.store(true);
  helper.join();
}

TEST(event_loop_followers_need_no_leader) {
  World world(0);
  for (int i = 0; i < 5; ++i) world.lead_one();
  // Now the gate is shut and nobody leads: a follower must not wait for the clock.
  Completion done;
  done.follow({world.loop.get()});
  const int before = world.answers->num_read.load();
  world.answers->put();
  CHECK(world.answers->wait(before + 1));
  // A follower that comes while another thread leads is noticed when that ends.
  for (int i = 0; i < 5; ++i) world.lead_one();
  world.answers->put();
  CHECK(world.answers->wait(before + 7));
  CHECK(done.complete([] {}));
  CHECK(!done.complete([] {}));
}

TEST(event_loop_requests_do_not_wait_for_a_leader) {
  World world(0);
  CHECK(world.loop->begin_lead());
  CHECK(!world.loop->begin_lead());
  world.requests->put();
  CHECK(world.requests->wait(1));
  world.answers->put();
  CHECK_EQ(world.answers->num_read.load(), 0);  // The leader is not at it.
  world.loop->end_lead();
  CHECK(world.answers->wait(1));
}

TEST(event_loop_leader_is_woken_by_another_end) {
  World world(0);
  // A thread that is not woken checks again after a second.
  constexpr int kRounds = 20, kMaxLate = 5;
  int num_late = 0;
  for (int i = 0; i < kRounds; ++i) {
    Completion done;
    std::thread other([&] {
      // In some rounds the end comes before the leader sleeps.
      if (i % 4 != 0) usleep(2000);
      done.complete([] {});
    });
    CHECK(world.loop->begin_lead());
    done.set_leader(world.loop.get());
    const int64_t begin = now_ns();
    world.loop->sleep_until([&] { return done.is_done(); }, now_ns() + kBoundNs);
    done.set_leader(nullptr);
    world.loop->end_lead();
    CHECK(done.is_done());
    if (now_ns() - begin > 900'000'000) ++num_late;
    other.join();
  }
  CHECK(num_late <= kMaxLate);
}

TEST(event_loop_leader_returns_at_the_deadline) {
  World world(0);
  CHECK(world.loop->begin_lead());
  world.loop->sleep_until([] { return false; }, now_ns() + 20'000'000);
  world.loop->end_lead();
  world.answers->put();
  CHECK(world.answers->wait(1));
}

}  // namespace
}  // namespace tandem::transfer
