// A unit test harness in a page: TEST(name) { ... } registers a test, CHECK and CHECK_EQ record a
// failure with its place and go on. test_main.cc runs the tests whose name contains argv[1].
#pragma once

#include <sstream>
#include <string>
#include <vector>

namespace tandem::testing {

struct TestCase {
  const char* name;
  void (*run)();
};

std::vector<TestCase>& test_cases();
void record_failure(const char* file, int line, const std::string& text);

struct Registration {
  Registration(const char* name, void (*run)()) { test_cases().push_back({name, run}); }
};

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  record_failure(file, line, out.str());
}

}  // namespace tandem::testing

#define TEST(name)                                                         \
  static void test_##name();                                               \
  static const ::tandem::testing::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) ::tandem::testing::record_failure(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) ::tandem::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
