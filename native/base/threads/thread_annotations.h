// Annotations that state which mutex guards which field, so that clang checks it (-Wthread-safety);
// other compilers ignore them.
//
// A field is GUARDED_BY a mutex; a function that is called with the mutex held says REQUIRES, one
// that locks it itself says EXCLUDES. The standard library's mutexes have no annotations, so this
// header has `Mutex`, `MutexLock` and `CondVar`, which do what std::mutex, std::unique_lock and
// std::condition_variable do.
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
// For functions whose locking clang cannot follow; a comment beside each use says why it is right.
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

// Holds a mutex during its own lifetime, except between `unlock` and `lock`.
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

// A condition variable. A wait releases the mutex and holds it again when it returns and when it
// calls the predicate; a lambda states this itself: `[&]() REQUIRES(mutex_) { return ...; }`.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  template <class Predicate>
  void wait(MutexLock& lock, Predicate is_met) {
    changed_.wait(lock.lock_, is_met);
  }
  // Waits until the predicate holds or the time is over. Returns false if the time was over first.
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
