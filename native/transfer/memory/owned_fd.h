// A descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace tandem::transfer {

class OwnedFd {
 public:
  explicit OwnedFd(int fd) : fd_(fd) {}
  ~OwnedFd() {
    if (fd_ >= 0) close(fd_);
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace tandem::transfer
