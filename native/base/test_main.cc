#include <atomic>
#include <cstdio>
#include <cstring>

#include "base/test.h"

namespace tandem::testing {
namespace {
std::atomic<int> failures{0};
}

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
  int num_run = 0;
  for (const TestCase& test : test_cases()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    const int before = failures.load();
    test.run();
    ++num_run;
    std::printf("%s %s\n", failures.load() == before ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d tests, %d failures\n", num_run, failures.load());
  return num_run == 0 || failures.load() != 0;
}
