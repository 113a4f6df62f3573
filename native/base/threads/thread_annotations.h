// What guards what, said so that clang checks it (-Wthread-safety); other compilers see nothing.
//
// A field is GUARDED_BY a mutex; a function that is called with it held says REQUIRES, one that takes
// it itself EXCLUDES. The standard's mutexes bear no annotations, so there are `Mutex`, `MutexLock`
// and `CondVar`, which do what std::mutex, std::unique_lock and std::condition_variable do.
#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define TANDEM_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define TANDEM_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) TANDEM_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY TANDEM_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) TANDEM_THREAD_ATTRIBUTE(guarded_by(mutex))
#define REQUIRES(...) TANDEM_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TANDEM_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) TANDEM_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TANDEM_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) TANDEM_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
// For what clang cannot follow; a comment beside it says why it is right.
#define NO_THREAD_SAFETY_ANALYSIS TANDEM_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace tandem {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex while it lives, but between `unlock` and `lock`.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// Waits let go of the mutex and have it again when they return and when they call the predicate, which
// says so itself if it is a lambda: `[&]() REQUIRES(mutex_) { return ...; }`.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  template <class Predicate>
  void wait(MutexLock& lock, Predicate is_met) {
    changed_.wait(lock.lock_, is_met);
  }
  // False: the time is over, and it is not met.
  template <class Time, class Predicate>
  bool wait_until(MutexLock& lock, const Time& at, Predicate is_met) {
    return changed_.wait_until(lock.lock_, at, is_met);
  }
  template <class Duration, class Predicate>
  bool wait_for(MutexLock& lock, const Duration& time, Predicate is_met) {
    return changed_.wait_for(lock.lock_, time, is_met);
  }

 private:
  std::condition_variable changed_;
};

}  // namespace tandem
