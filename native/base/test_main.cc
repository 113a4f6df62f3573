#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/test.h"

namespace tandem::testing {
namespace {
constexpr unsigned kTestLimitSeconds = 180;
std::atomic<int> failures{0};
std::atomic<const char*> running_test{""};

// A test that hangs ends the run under its name; without this only the caller's limit would end it.
void end_hanging_test(int) {
  const char* name = running_test.load();
  for (const char* text : {"HANG ", name, "\n"}) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  }
  std::abort();
}
}  // namespace

std::vector<TestCase>& test_cases() {
  static std::vector<TestCase> cases;
  return cases;
}

void record_failure(const char* file, int line, const std::string& text) {
  failures.fetch_add(1);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

}  // namespace tandem::testing

int main(int argc, char** argv) {
  using namespace tandem::testing;
  const char* filter = argc > 1 ? argv[1] : "";
  signal(SIGALRM, end_hanging_test);
  int num_run = 0;
  for (const TestCase& test : test_cases()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    const int before = failures.load();
    running_test.store(test.name);
    alarm(kTestLimitSeconds);
    test.run();
    alarm(0);
    ++num_run;
    std::printf("%s %s\n", failures.load() == before ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d tests, %d failures\n", num_run, failures.load());
  return num_run == 0 || failures.load() != 0;
}
