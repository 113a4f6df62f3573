// Goal: a read gives the file's bytes or an error, into memory that nobody else writes, whoever stops
// meanwhile. Run under ASan, UBSan and TSan. Method: several threads, real files, io_uring and threads.
#include "transfer/files/direct_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/test.h"

namespace tandem::transfer {
namespace {

constexpr uint64_t kFileBytes = (3 << 20) + 12'345;
constexpr uint64_t kPlaceBytes = 1 << 19;
constexpr int kTimeoutMs = 30'000;
constexpr FileBackend kBackends[] = {FileBackend::kIoUring, FileBackend::kThreads};

// A file of random bytes, removed at the end.
class RandomFile {
 public:
  RandomFile() {
    char name[] = "/tmp/tandem-reader-test-XXXXXX";
    close(mkstemp(name));
    path_ = name;
    std::mt19937 draw(7);
    bytes_.resize(kFileBytes);
    for (char& byte : bytes_) byte = static_cast<char>(draw());
    write(kFileBytes);
  }
  ~RandomFile() { unlink(path_.c_str()); }

  void write(uint64_t length) const {
    std::ofstream out(path_, std::ios::binary | std::ios::trunc);
    out.write(bytes_.data(), static_cast<std::streamsize>(length));
    CHECK(out.good());
  }
  const std::string& path() const { return path_; }
  const char* at(uint64_t offset) const { return bytes_.data() + offset; }

 private:
  std::string path_;
  std::vector<char> bytes_;
};

// Null where this kernel or sandbox has no io_uring; the other backend is tested.
std::unique_ptr<DirectReader> make(FileBackend backend, uint64_t places, uint32_t depth = 4,
                                   uint64_t part_bytes = 64 << 10) {
  auto reader = DirectReader::create({places * kPlaceBytes, backend, depth, part_bytes});
  if (reader.is_ok()) return std::move(reader.value());
  CHECK(backend == FileBackend::kIoUring && reader.error().code == Code::kUnsupported);
  return nullptr;
}

// Counts the ranges that did not come as the file has them.
int read_some(DirectReader& reader, const RandomFile& file, size_t number, uint64_t first_place,
              uint32_t seed) {
  constexpr uint64_t kPlaces = 4;
  std::mt19937 draw(seed);
  int num_wrong = 0;
  for (int round = 0; round < 25; ++round) {
    struct Range {
      uint64_t read, offset, length, at;
    };
    std::vector<Range> ranges;
    for (uint64_t place = first_place; place < first_place + kPlaces; ++place) {
      const uint64_t length = 1 + draw() % (kPlaceBytes - 2 * DirectReader::kAlignment);
      const uint64_t offset = draw() % (kFileBytes - length);
      const uint64_t at = place * kPlaceBytes;
      Result<uint64_t> read = reader.begin(number, offset, length, at);
      if (read.is_ok()) ranges.push_back({read.value(), offset, length, at});
    }
    num_wrong += ranges.size() != kPlaces;
    for (const Range& range : ranges) {
      num_wrong += !reader.finish(range.read, kTimeoutMs).is_ok();
      const uint8_t* found =
          reader.memory() + range.at + range.offset % DirectReader::kAlignment;
      const auto* wanted = reinterpret_cast<const uint8_t*>(file.at(range.offset));
      num_wrong += !std::equal(found, found + range.length, wanted);
    }
  }
  return num_wrong;
}

}  // namespace

TEST(reads_of_several_threads_have_the_files_bytes) {
  const RandomFile file;
  for (const FileBackend backend : kBackends) {
    const std::unique_ptr<DirectReader> reader = make(backend, 12);
    if (!reader) continue;
    const size_t number = reader->add_file(file.path()).value();
    std::atomic<int> num_wrong{0};
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 3; ++t)
      threads.emplace_back([&, t] { num_wrong += read_some(*reader, file, number, t * 4, t); });
    for (std::thread& thread : threads) thread.join();
    CHECK(num_wrong == 0);
    // A read is forgotten at its end.
    CHECK(reader->finish(1, 0).error().code == Code::kNotFound);
  }
}

TEST(reads_of_ranges_and_places_that_do_not_exist_are_refused) {
  const RandomFile file;
  for (const FileBackend backend : kBackends) {
    const std::unique_ptr<DirectReader> reader = make(backend, 1);
    if (!reader) continue;
    const size_t number = reader->add_file(file.path()).value();
    CHECK(!reader->add_file(file.path() + ".absent").is_ok());
    CHECK(reader->begin(number + 1, 0, 1, 0).error().code == Code::kNotFound);
    CHECK(!reader->begin(number, kFileBytes, 1, 0).is_ok());
    CHECK(!reader->begin(number, UINT64_MAX, 2, 0).is_ok());
    const uint64_t last = UINT64_MAX / DirectReader::kAlignment * DirectReader::kAlignment;
    for (const auto& [length, at] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 0}, {1, 512}, {kPlaceBytes + 1, 0}, {1, kPlaceBytes}, {1, last}})
      CHECK(reader->begin(number, 0, length, at).error().code == Code::kConfig);
  }
}

TEST(a_file_that_was_cut_gives_an_error_and_no_bytes) {
  for (const FileBackend backend : kBackends) {
    const RandomFile file;
    const std::unique_ptr<DirectReader> reader = make(backend, 1);
    if (!reader) continue;
    const size_t number = reader->add_file(file.path()).value();
    file.write(5000);
    const uint64_t read = reader->begin(number, 100'000, 200'000, 0).value();
    CHECK(reader->finish(read, kTimeoutMs).error().code == Code::kCorruption);
  }
}

TEST(a_file_that_may_change_is_read_as_it_was_written_last) {
  for (const FileBackend backend : kBackends) {
    const RandomFile file;
    const std::unique_ptr<DirectReader> reader = make(backend, 1);
    if (!reader) continue;
    const size_t number = reader->add_file(file.path(), true).value();
    const int fd = ::open(file.path().c_str(), O_WRONLY);
    for (uint8_t round = 1; round < 4; ++round) {
      const std::vector<uint8_t> bytes(3000, round);
      CHECK(pwrite(fd, bytes.data(), bytes.size(), 50'000) == static_cast<ssize_t>(bytes.size()));
      const uint64_t read = reader->begin(number, 50'000, bytes.size(), 0).value();
      CHECK(reader->finish(read, kTimeoutMs).is_ok());
      CHECK(std::equal(bytes.begin(), bytes.end(),
                       reader->memory() + 50'000 % DirectReader::kAlignment));
    }
    ::close(fd);
  }
}

// The memory outlives reads whose caller has gone.
TEST(a_reader_stops_while_reads_are_under_way) {
  const RandomFile file;
  for (const FileBackend backend : kBackends) {
    for (int round = 0; round < 10; ++round) {
      std::unique_ptr<DirectReader> reader = make(backend, 5, 16, 4096);
      if (!reader) break;
      const size_t number = reader->add_file(file.path()).value();
      for (uint64_t place = 0; place < 5; ++place)
        CHECK(reader->begin(number, place * 1000, kPlaceBytes - 8192, place * kPlaceBytes).is_ok());
      DirectReader::stop(std::move(reader));
    }
  }
}

}  // namespace tandem::transfer
