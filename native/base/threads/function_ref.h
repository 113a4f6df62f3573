// A borrowed callable: two words, no allocation. std::function_ref comes with C++26 only.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace tandem {

template <class Signature>
class FunctionRef;

// The callable must outlive every call; pass it down, never store it.
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> &&
             std::is_invocable_r_v<R, F&, Args...>)
  FunctionRef(F&& callable)  // NOLINT: implicit, so that a lambda can be passed
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}

  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace tandem
