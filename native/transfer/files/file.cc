#include "transfer/files/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tandem::transfer {
namespace {

Error explain(const std::string& path, const char* call, int error_number) {
  const std::string what = path + ": " + describe_errno(call, error_number);
  Code code = Code::kInternal;
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      code = Code::kNotFound;
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = Code::kPermissionDenied;
      break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
      code = Code::kCapacity;
      break;
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      code = Code::kConfig;
      break;
  }
  return {code, "transfer.open_file", what, "path"};
}

// Reserves a new file's length on the disk, so that no write fails later for lack of space.
int reserve(int fd, uint64_t length) {
  const int error_number = posix_fallocate(fd, 0, static_cast<off_t>(length));
  if (error_number != EOPNOTSUPP && error_number != EINVAL) return error_number;
  return ftruncate(fd, static_cast<off_t>(length)) == 0 ? 0 : errno;
}

}  // namespace

Result<std::shared_ptr<File>> File::open(const FileOptions& options) {
  if (options.create_bytes > 0 && !options.is_writable)
    return Error{Code::kConfig, "transfer.open_file", "a file that is made must be writable",
                 "writable"};
  const int access = (options.is_writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  const int create = options.create_bytes > 0 ? O_CREAT : 0;
  const int fd = ::open(options.path.c_str(), access | create, 0600);
  if (fd < 0) return explain(options.path, "open", errno);
  struct stat info{};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return Error{Code::kConfig, "transfer.open_file", options.path + " is no regular file", "path"};
  }
  uint64_t length = static_cast<uint64_t>(info.st_size);
  if (options.create_bytes > 0 && length == 0) {
    if (const int error_number = reserve(fd, options.create_bytes); error_number != 0) {
      ::close(fd);
      return explain(options.path, "fallocate", error_number);
    }
    length = options.create_bytes;
  }
  if (length == 0 || (options.create_bytes > 0 && length != options.create_bytes)) {
    ::close(fd);
    return Error{length == 0 ? Code::kConfig : Code::kConflict, "transfer.open_file",
                 options.path + " has " + std::to_string(length) + " bytes, wanted " +
                     (options.create_bytes > 0 ? std::to_string(options.create_bytes) : "some"),
                 "path"};
  }
  std::shared_ptr<File> file(new File(options.path, fd, length, options.is_writable));
  if (options.wants_direct) {
    // Open by this process's own descriptor, since the name may refer to another file by now.
    const std::string own = "/proc/self/fd/" + std::to_string(fd);
    file->direct_fd_ = ::open(own.c_str(), access | O_DIRECT);
    file->direct_errno_ = file->direct_fd_ < 0 ? errno : 0;
  }
  return file;
}

File::~File() {
  ::close(fd_);
  if (direct_fd_ >= 0) ::close(direct_fd_);
}

std::string File::direct_refusal() const {
  if (is_direct()) return "";
  if (direct_fd_ >= 0) return "the device refused aligned blocks of 4 KiB";
  if (direct_errno_ != 0) return describe_errno("open with O_DIRECT", direct_errno_);
  return "not asked for";
}

Status File::check(Op op, uint64_t offset, uint64_t length) const {
  if (offset > length_ || length > length_ - offset)
    return {Code::kConfig, "transfer.submit",
            path_ + ": offset " + std::to_string(offset) + ", " + std::to_string(length) +
                " bytes, but it has " + std::to_string(length_), "offset"};
  if (op == Op::kWrite && !is_writable_)
    return {Code::kPermissionDenied, "transfer.submit", path_ + " was opened for reading", "op"};
  return {};
}

Status File::sync() const {
  if (fdatasync(fd_) == 0) return {};
  Error error = explain(path_, "fdatasync", errno);
  error.where = "transfer.sync";
  return error;
}

File::Part File::cut(uint64_t offset, uint64_t length, uint64_t most) const {
  length = std::min(length, most);
  if (!is_direct()) return {fd_, length};
  if (const uint64_t past = offset % kAlignment; past != 0)
    return {fd_, std::min(length, kAlignment - past)};
  const uint64_t whole = length / kAlignment * kAlignment;
  return whole > 0 ? Part{direct_fd_, whole} : Part{fd_, length};
}

int File::descriptor(uint64_t offset, uint64_t length) const {
  return is_direct() && (offset | length) % kAlignment == 0 ? direct_fd_ : fd_;
}

}  // namespace tandem::transfer
