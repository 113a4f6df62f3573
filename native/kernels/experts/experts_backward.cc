// The gradient of routed experts with respect to their input and the router weights.
//
// Two parallel loops, as in the forward direction. The first takes the rows of an expert and 64
// columns of gate and up: the gradient of h is a product with the turned down panel, and the
// activation makes of it those of gate and up, in the format of gradients. The second takes 64 columns of the result
// and sums over all experts, in ascending order of their ids, products with turned gate and up
// panels. A panel is turned, 128 KiB at a time, for all rows of its expert, and then forgotten.
#include <algorithm>
#include <vector>

#include "kernels/experts/experts.h"
#include "kernels/experts/experts_routing.h"
#include "kernels/linear/operand.h"
#include "kernels/weights/turned_panel.h"

namespace tandem {
namespace {

// Rows of one task: their gradients of h take 128 KiB per 64 columns in fp32.
constexpr size_t kGradRows = 512;

float gradient_of(uint16_t value) { return widen_bf16(value); }
float gradient_of(float value) { return value; }

template <class T>
float multiply_bias(const T* row, const float* bias, size_t size) {
  float sum = 0.0f;
  for (size_t c = 0; c < size; ++c) sum += gradient_of(row[c]) * bias[c];
  return sum;
}

}  // namespace

// Some of the rows of an expert, for one task.
struct ExpertBank::GradShare {
  size_t expert_id;
  size_t first_pair;
  size_t num_rows;
};

struct ExpertBank::GradScratch {
  std::vector<GradShare> shares;    // Ascending expert ids.
  size_t num_pairs = 0;
  Operand d_out;                    // In the format of gradients, as the next two.
  const uint8_t* kept = nullptr;    // [pairs][gate, up][inner columns]
  uint8_t* d_gate_up = nullptr;     // The same.
  float* d_weights = nullptr;       // [panels of all parts][pairs]
  std::vector<float*> sums;         // Of each part: [tokens][hidden]; of one part, the result.
};

Status ExpertBank::backward(ThreadPool& pool, const GradBatch& batch) const {
  if (batch.num_tokens == 0) return {};
  Result<Routing> routed = route({
      .x = batch.x,
      .is_bf16 = false,
      .num_tokens = batch.num_tokens,
      .expert_ids = batch.expert_ids,
      .has_int64_ids = batch.has_int64_ids,
      .top_k = batch.top_k,
      .weights = batch.weights,
      .out = nullptr});
  if (!routed.is_ok()) return routed.error();
  const Routing& routing = routed.value();
  GradScratch scratch;
  for (const Routing::Active& active : routing.active)
    for (size_t first = 0; first < active.num_pairs; first += kGradRows)
      scratch.shares.push_back({active.expert_id, active.first_pair + first,
                                std::min(kGradRows, active.num_pairs - first)});
  const size_t num_pairs = scratch.num_pairs = routing.tokens.size();
  const size_t num_tokens = batch.num_tokens;
  const size_t hidden_row = padded_size(format_, hidden_size_);
  const size_t out_row = num_down_panels_ * kPanelColumns;
  const WeightFormat rounding = gradient_format(format_);
  const size_t inner_bytes =
      round_up(num_pairs * 2 * inner_columns() * gradient_bytes(format_), kPackedAlignment);
  const size_t sum_bytes =
      parts_.size() > 1 ? round_up(num_tokens * hidden_size_ * 4, kPackedAlignment) : 0;
  const bool is_kept = batch.kept != nullptr;
  thread_local Arena arena;
  Status status = arena.reserve(
      kPackedAlignment + operand_bytes(rounding, num_tokens, out_row) +
      round_up(num_pairs * whole_.num_gate_panels * 4, kPackedAlignment) +
      (is_kept ? 0 : inner_bytes + operand_bytes(format_, num_tokens, hidden_row)) +
      (batch.d_gate_up ? 0 : inner_bytes) + parts_.size() * sum_bytes);
  if (!status.is_ok()) return status;
  const auto take_floats = [&](size_t size) {
    return reinterpret_cast<float*>(arena.take(size * 4));
  };
  scratch.d_out = take_operand(arena, rounding, num_tokens, out_row);
  scratch.d_weights = take_floats(num_pairs * whole_.num_gate_panels);
  scratch.d_gate_up = batch.d_gate_up != nullptr
                          ? static_cast<uint8_t*>(batch.d_gate_up)
                          : arena.take(inner_bytes);
  scratch.kept = static_cast<const uint8_t*>(batch.kept);
  for (size_t p = 0; p < parts_.size(); ++p)
    scratch.sums.push_back(sum_bytes > 0 ? take_floats(num_tokens * hidden_size_) : batch.d_x);
  if (!is_kept) {
    Scratch forward;
    forward.x = take_operand(arena, format_, num_tokens, hidden_row);
    forward.h.resize(parts_.size());
    forward.delta = batch.delta;
    uint8_t* kept = arena.take(inner_bytes);
    forward.kept = kept;
    scratch.kept = kept;
    status = prepare_rows(pool, *kernels_, {format_, batch.x, batch.is_bf16, hidden_size_, 0,
                                            num_tokens, forward.x});
    if (status.is_ok()) status = run_gate_up(pool, routing, forward);
    if (!status.is_ok()) return status;
  }
  status = prepare_rows(pool, *kernels_, {rounding, batch.d_out, batch.is_d_out_bf16,
                                          hidden_size_, 0, num_tokens, scratch.d_out});
  if (status.is_ok()) status = run_inner_grads(pool, routing, scratch, batch);
  if (status.is_ok()) status = run_input_grads(pool, routing, scratch, batch);
  if (!status.is_ok()) return status;
  sum_weight_grads(routing, scratch, batch);
  if (parts_.size() == 1) return {};
  return merge_parts(pool, {scratch.sums.begin(), scratch.sums.end()}, num_tokens, batch.d_x);
}

Status ExpertBank::run_inner_grads(ThreadPool& pool, const Routing& routing,
                                   const GradScratch& scratch, const GradBatch& batch) const {
  return run_parts(
      pool,
      [&](const Part& part) { return scratch.shares.size() * part.num_gate_panels; },
      [&](const PartTask& task) {
        const size_t num_panels = parts_[task.part].num_gate_panels;
        run_inner_task(routing, scratch, batch, scratch.shares[task.item / num_panels], task.part,
                       task.item % num_panels);
        return Status();
      });
}

void ExpertBank::run_inner_task(const Routing& routing, const GradScratch& scratch,
                                const GradBatch& batch, const GradShare& share, size_t part_id,
                                size_t panel) const {
  thread_local std::vector<float> dh(kGradRows * kPanelColumns);
  const Part& part = parts_[part_id];
  const size_t column = panel * kPanelColumns;
  const uint8_t* down =
      part.data + share.expert_id * part.expert_bytes + part.gate_up_bytes;
  const size_t size = padded_size(down_format_, part.size);
  const size_t num_k = column < size ? std::min(kPanelColumns, size - column) : 0;
  multiply_turned(*kernels_, {
      .format = down_format_,
      .panels = down,
      .panel_stride = part.down_panel_bytes,
      .num_panels = num_down_panels_,
      .first_k = column,
      .num_k = num_k,
      .d_y = scratch.d_out,
      .row_ids = routing.tokens.data() + share.first_pair,
      .num_rows = share.num_rows,
      .out = dh.data(),
      .out_stride = kPanelColumns,
      .num_columns = kPanelColumns});
  const size_t columns = inner_columns();
  const size_t at = (share.first_pair * 2 * columns + part.first + column) * gradient_bytes(format_);
  const size_t row_bytes = columns * gradient_bytes(format_);
  float* d_weights = scratch.d_weights +
                     (part.first / kPanelColumns + panel) * scratch.num_pairs + share.first_pair;
  const float* extra = batch.extra == nullptr
                           ? nullptr
                           : batch.extra + share.first_pair * columns + part.first + column;
  kernels_->activate_back({
      .activation = activation_,
      .num_rows = share.num_rows,
      .is_f32 = format_.bits == 32,
      .gate = scratch.kept + at,
      .up = scratch.kept + at + row_bytes,
      .row_stride = 2 * columns,
      .dh = dh.data(),
      .extra = extra,
      .extra_stride = columns,
      .weights = routing.weights.data() + share.first_pair,
      .d_gate = scratch.d_gate_up + at,
      .d_up = scratch.d_gate_up + at + row_bytes,
      .d_weights = d_weights});
  if (down_bias_.empty() || part_id > 0 || panel > 0) return;
  const float* bias = &down_bias_[share.expert_id * num_down_panels_ * kPanelColumns];
  for (size_t r = 0; r < share.num_rows; ++r) {
    const auto token = static_cast<size_t>(routing.tokens[share.first_pair + r]);
    const uint8_t* row = scratch.d_out.data + token * scratch.d_out.row_bytes;
    d_weights[r] += format_.bits == 32
                        ? multiply_bias(reinterpret_cast<const float*>(row), bias, hidden_size_)
                        : multiply_bias(reinterpret_cast<const uint16_t*>(row), bias, hidden_size_);
  }
}

Status ExpertBank::run_input_grads(ThreadPool& pool, const Routing& routing,
                                   const GradScratch& scratch, const GradBatch& batch) const {
  return run_parts(
      pool, [&](const Part&) { return num_down_panels_; },
      [&](const PartTask& task) {
        run_input_task(routing, scratch, task.part, task.item * kPanelColumns,
                       scratch.sums[task.part], batch.num_tokens);
        return Status();
      });
}

void ExpertBank::run_input_task(const Routing& routing, const GradScratch& scratch, size_t part_id,
                                size_t first_k, float* sums, size_t num_tokens) const {
  thread_local std::vector<float> rows(kGradRows * kPanelColumns);
  const Part& part = parts_[part_id];
  const size_t num_columns = std::min(kPanelColumns, hidden_size_ - first_k);
  const size_t num_k = std::min(kPanelColumns, padded_size(format_, hidden_size_) - first_k);
  for (size_t token = 0; token < num_tokens; ++token)
    std::fill_n(sums + token * hidden_size_ + first_k, num_columns, 0.0f);
  Operand operand{};
  const size_t value_bytes = gradient_bytes(format_);
  operand.row_bytes = 2 * inner_columns() * value_bytes;
  for (const GradShare& share : scratch.shares) {
    const uint8_t* expert = part.data + share.expert_id * part.expert_bytes;
    for (size_t which = 0; which < 2; ++which) {
      const size_t first = (share.first_pair * 2 + which) * inner_columns() + part.first;
      operand.data = scratch.d_gate_up + first * value_bytes;
      multiply_turned(*kernels_,
                      {
                          .format = format_,
                          .panels = expert + which * hidden_panel_bytes_,
                          .panel_stride = 2 * hidden_panel_bytes_,
                          .num_panels = part.num_gate_panels,
                          .first_k = first_k,
                          .num_k = num_k,
                          .d_y = operand,
                          .row_ids = nullptr,
                          .num_rows = share.num_rows,
                          .out = rows.data(),
                          .out_stride = kPanelColumns,
                          .num_columns = kPanelColumns,
                          .is_added = which == 1});
    }
    for (size_t r = 0; r < share.num_rows; ++r) {
      const auto token = static_cast<size_t>(routing.tokens[share.first_pair + r]);
      float* row = sums + token * hidden_size_ + first_k;
      for (size_t c = 0; c < num_columns; ++c) row[c] += rows[r * kPanelColumns + c];
    }
  }
}

void ExpertBank::sum_weight_grads(const Routing& routing, const GradScratch& scratch,
                                  const GradBatch& batch) const {
  std::fill_n(batch.d_weights, batch.num_tokens * batch.top_k, 0.0f);
  for (size_t pair = 0; pair < scratch.num_pairs; ++pair) {
    float sum = 0.0f;
    for (size_t panel = 0; panel < whole_.num_gate_panels; ++panel)
      sum += scratch.d_weights[panel * scratch.num_pairs + pair];
    batch.d_weights[routing.slots[pair]] = sum;
  }
}

}  // namespace tandem
