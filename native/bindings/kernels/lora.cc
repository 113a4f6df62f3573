#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/kernels/bind_lora.h"
#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/linear/lora.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

// The rows of a step by the LoRA adapter that they use, and scratch memory that the step's calls
// share.
class LoraRows {
 public:
  explicit LoraRows(size_t num_rows) : num_rows_(num_rows) {}

  void add(size_t slot, std::vector<int64_t> rows) {
    for (const int64_t row : rows)
      if (row < 0 || static_cast<size_t>(row) >= num_rows_)
        raise({Code::kShape, "kernels.lora",
               "row " + std::to_string(row) + " of " + std::to_string(num_rows_), "rows"});
    groups_.push_back({slot, std::move(rows)});
  }

  struct Group {
    size_t slot;
    std::vector<int64_t> rows;
  };
  size_t num_rows() const { return num_rows_; }
  const std::vector<Group>& groups() const { return groups_; }
  LoraScratch scratch;
  std::vector<LoraGroup> tasks;

 private:
  size_t num_rows_;
  std::vector<Group> groups_;
};

// The LoRA factors of one matrix by adapter slot. A slot is written by one thread, while no call
// uses it.
class LoraBank {
 public:
  explicit LoraBank(size_t num_slots) : slots_(num_slots) {}

  void add_part(size_t slot, const TensorView& down, const TensorView& up, float scale,
                size_t first_output, size_t out_size, size_t head) {
    constexpr const char* kWhere = "kernels.lora";
    if (slot >= slots_.size())
      raise({Code::kShape, kWhere, "slot " + std::to_string(slot) + " of " +
                                       std::to_string(slots_.size()), "slot"});
    if (down.num_dims() != 2 || !down.is_dense_from(0) || !down.is_float())
      refuse_view(kWhere, "down", down, "give a contiguous [rank, inputs]");
    const size_t panels = (out_size + kLoraColumns - 1) / kLoraColumns;
    if (up.num_dims() != 3 || up.shape(0) != panels || up.shape(1) != down.shape(0) ||
        up.shape(2) != kLoraColumns || !up.is_dense_from(0))
      refuse_view(kWhere, "up", up, "give a contiguous [panels, rank, 64]");
    check_same_type(kWhere, "up", up, down);
    Slot& own = slots_[slot];
    own.parts.push_back({
        .down = down.data(),
        .up = up.data(),
        .rank = down.shape(0),
        .in_size = down.shape(1),
        .first_output = first_output,
        .out_size = out_size,
        .head = head,
        .scale = scale});
    own.kept.push_back(down);
    own.kept.push_back(up);
  }

  void clear(size_t slot) {
    if (slot < slots_.size()) slots_[slot] = Slot();
  }

  bool is_needed(const LoraRows& rows) const {
    for (const LoraRows::Group& group : rows.groups())
      if (group.slot < slots_.size() && !slots_[group.slot].parts.empty()) return true;
    return false;
  }

  void run(const TensorView& x, const TensorView& sums, LoraRows& rows, const TensorView* out,
           bool is_added, ThreadPool* pool, const std::string& isa) const {
    constexpr const char* kWhere = "kernels.lora";
    LoraTask task;
    task.num_rows = rows.num_rows();
    if ((sums.num_dims() != 2 && sums.num_dims() != 3) || !sums.is_float32())
      refuse_view(kWhere, "sums", sums, "give float32 [rows, outputs] or [rows, heads, outputs]");
    const bool has_heads = sums.num_dims() == 3;
    task.num_heads = has_heads ? sums.shape(1) : 1;
    task.out_size = sums.shape(has_heads ? 2 : 1);
    // Without heads, views of any dimensions are rows.
    const auto measure = [&](const char* name, const TensorView& view) {
      const size_t last = has_heads ? 2 : 1;
      if (view.num_dims() <= last || (has_heads && view.num_dims() != 3) ||
          view.shape(0) != task.num_rows || (has_heads && view.shape(1) != task.num_heads) ||
          !view.is_dense_from(last) || !view.is_float())
        refuse_view(kWhere, name, view, "give all rows of the step, dense, with the heads of sums");
      size_t size = 1;
      for (size_t i = last; i < view.num_dims(); ++i) size *= view.shape(i);
      return size;
    };
    const size_t in_size = measure("x", x);
    measure("sums", sums);
    task.x = x.data();
    task.x_stride = x.stride(0);
    task.x_head_stride = has_heads ? x.stride(1) : 0;
    task.type = x.float_type();
    task.sums = static_cast<float*>(sums.data());
    task.sums_stride = sums.stride(0);
    task.sums_head_stride = has_heads ? sums.stride(1) : 0;
    if (out != nullptr) {
      if (measure("out", *out) != task.out_size)
        refuse_view(kWhere, "out", *out, "give as many outputs as sums");
      task.out = out->data();
      task.out_stride = out->stride(0);
      task.out_head_stride = has_heads ? out->stride(1) : 0;
      task.out_type = out->float_type();
      task.is_added = is_added;
    }
    rows.tasks.clear();
    for (const LoraRows::Group& group : rows.groups()) {
      if (group.slot >= slots_.size()) continue;
      const Slot& slot = slots_[group.slot];
      for (size_t i = 0; i < slot.parts.size(); ++i) {
        const LoraPart& part = slot.parts[i];
        check_same_type(kWhere, "x", x, slot.kept[2 * i]);
        if (part.in_size != in_size || part.first_output > task.out_size ||
            part.out_size > task.out_size - part.first_output || part.head >= task.num_heads)
          refuse_view(kWhere, "x", x, "give the inputs that the adapter was made for");
      }
      if (!slot.parts.empty())
        rows.tasks.push_back({group.rows.data(), group.rows.size(), slot.parts.data(),
                              slot.parts.size()});
    }
    const RowKernels& kernels =
        choose_row_kernels(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
    run_released([&] { return run_lora(kernels, pool, task, rows.tasks, rows.scratch); });
  }

 private:
  struct Slot {
    std::vector<LoraPart> parts;
    std::vector<TensorView> kept;  // Two a part.
  };
  std::vector<Slot> slots_;
};

}  // namespace

void bind_lora(nb::module_& module) {
  nb::class_<LoraRows>(module, "LoraRows",
                       "Which rows of a step belong to which adapter. One thread.")
      .def(nb::init<size_t>(), "num_rows"_a)
      .def("add", &LoraRows::add, "slot"_a, "rows"_a,
           "Name the rows of the adapter of a slot. Raises: ShapeError.");
  nb::class_<LoraBank>(
      module, "LoraBank",
      "The low-rank changes of one matrix, by slot of their adapter. A slot is written while no\n"
      "call uses it; calls that use others may run meanwhile.")
      .def(nb::init<size_t>(), "num_slots"_a)
      .def("add_part", &LoraBank::add_part, "slot"_a, "down"_a, "up"_a, "scale"_a,
           "first_output"_a, "out_size"_a, "head"_a = 0,
           "Add scale * (x down^T) up to some outputs, for the rows of a slot.\n\n"
           "Args:\n"
           "    down: [rank, inputs], contiguous, float32 or bfloat16; kept.\n"
           "    up: [panels, rank, 64] of the same type: column c of the outputs is at\n"
           "        [c / 64, :, c % 64], and zero beyond them; kept.\n"
           "Raises: ShapeError.")
      .def("clear", &LoraBank::clear, "slot"_a, "Forget the parts of a slot.")
      .def("is_needed", &LoraBank::is_needed, "rows"_a,
           "Whether a step has rows of a slot with parts.")
      .def("run", &LoraBank::run, "x"_a, "sums"_a, "rows"_a, "out"_a.none() = nb::none(),
           "is_added"_a = false, "pool"_a.none() = nb::none(), "isa"_a = "",
           "Add the changes to `sums`, then round all of these once to `out`.\n\n"
           "Args:\n"
           "    x: [rows, inputs] or [rows, heads, inputs of a head], of the parts' type.\n"
           "    sums: float32 [rows, outputs] or [rows, heads, outputs of a head], the product\n"
           "        without adapters; says whether there are heads.\n"
           "    rows: of the step.\n"
           "    out: of the shape of `sums`; None leaves the sums where they are.\n"
           "    is_added: add to what `out` holds.\n"
           "Raises: ShapeError; ConfigError or UnsupportedError (isa).");
}

}  // namespace tandem::bindings
