#include "bindings/status.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

namespace nb = nanobind;

namespace tandem::bindings {

void raise(const Error& error) {
  const nb::object field = error.field.empty() ? nb::none() : nb::cast(error.field);
  const nb::object exception = nb::module_::import_("tandem.core.errors")
                                   .attr("make_error")(nb::cast(std::string(code_name(error.code))),
                                                       error.where, error.what, field);
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

void bind_status(nb::module_& module) {
  module.def(
      "error_codes",
      [] { return std::vector<std::string>(kCodeNames.begin(), kCodeNames.end()); },
      "Codes that native errors carry, in the order of `tandem.core.errors.ERROR_CODES`.");
  module.def(
      "raise_error",
      [](const std::string& code, const std::string& where, const std::string& what,
         const std::string& field) {
        for (size_t i = 0; i < kCodeNames.size(); ++i)
          if (kCodeNames[i] == code) raise({static_cast<Code>(i), where, what, field});
        raise({Code::kConfig, "status.raise", "unknown code " + code, "code"});
      },
      nb::arg("code"), nb::arg("where"), nb::arg("what"), nb::arg("field") = "",
      "Raise the error of this code as native code would; for tests of the translation.");
}

}  // namespace tandem::bindings
