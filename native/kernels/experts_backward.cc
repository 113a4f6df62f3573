// The gradient of routed experts with respect to their input and the router weights.
//
// Two parallel loops, as in the forward direction. The first takes up to kGradRows rows of an
// expert and some of its columns: gate and up are computed again in fp32, the gradient of h is the
// transposed product with down, and the activation turns them into the gradients of gate and up.
// The second takes kGradInputs columns of the result and sums over all experts in ascending order
// of their ids. Both read the forward direction's packed weights.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/experts.h"
#include "kernels/experts_routing.h"
#include "kernels/operand.h"

namespace tandem {
namespace {

// Rows of one task: their transposed gradients stay in a core's L2.
constexpr size_t kGradRows = 96;
// Tasks of a thread at least, for balance, before the columns of an expert are split.
constexpr size_t kBackwardTasksPerThread = 4;
constexpr size_t kBackwardMergeChunk = 4096;

// Memory of a thread, kept: it is needed for each task of each layer.
float* grow(std::vector<float>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// to[column][stride] = from[row][from_stride]; rows beyond num_rows are zero.
void transpose(const float* from, size_t from_stride, size_t num_rows, size_t num_columns,
               size_t stride, float* to) {
  for (size_t c = 0; c < num_columns; ++c)
    std::fill(to + c * stride + num_rows, to + (c + 1) * stride, 0.0f);
  constexpr size_t kBlock = 16;
  for (size_t first = 0; first < num_rows; first += kBlock)
    for (size_t c = 0; c < num_columns; ++c)
      for (size_t r = first; r < std::min(first + kBlock, num_rows); ++r)
        to[c * stride + r] = from[r * from_stride + c];
}

}  // namespace

// Some rows of an expert, and where their gradients are in the scratch.
struct ExpertBank::GradShare {
  size_t expert_id;
  size_t first_pair;
  size_t num_rows;
  size_t stride;  // Rows in whole vectors.
  size_t offset;  // Sum of the strides before.
};

struct ExpertBank::GradScratch {
  std::vector<GradShare> shares;   // Ascending expert ids.
  size_t num_rows = 0;             // Sum of the strides.
  std::vector<float*> d_gate;      // Of each part: of each share [columns of panels][stride].
  std::vector<float*> d_up;
  std::vector<float*> d_weights;   // Of each part: [gate panels][rows].
  std::vector<float*> sums;        // Of each part: [tokens][hidden]; empty for one part.
};

Status ExpertBank::backward(ThreadPool& pool, const GradBatch& batch) const {
  if (activation_.kind != ActivationKind::kSilu)
    return {Code::kUnsupported, "kernels.experts_backward",
            "there is no gradient of GELU here: keep these experts as tensors", "activation"};
  if (batch.num_tokens == 0) return {};
  Result<Routing> routed = route({batch.x, false, batch.num_tokens, batch.expert_ids,
                                  batch.has_int64_ids, batch.top_k, batch.weights, nullptr});
  if (!routed.is_ok()) return routed.error();
  const Routing& routing = routed.value();
  GradScratch scratch;
  for (const Routing::Active& active : routing.active)
    for (size_t first = 0; first < active.num_pairs; first += kGradRows) {
      const size_t count = std::min(kGradRows, active.num_pairs - first);
      const size_t stride = round_up(count, kGradLanes);
      scratch.shares.push_back(
          {active.expert_id, active.first_pair + first, count, stride, scratch.num_rows});
      scratch.num_rows += stride;
    }
  const auto columns_of = [](const Part& part) { return part.num_gate_panels * kPanelColumns; };
  const size_t sum_size = parts_.size() > 1 ? batch.num_tokens * hidden_size_ : 0;
  size_t scratch_bytes = kPackedAlignment;
  for (const Part& part : parts_)
    scratch_bytes += 2 * round_up(scratch.num_rows * columns_of(part) * 4, kPackedAlignment) +
                     round_up(scratch.num_rows * part.num_gate_panels * 4, kPackedAlignment) +
                     round_up(sum_size * 4, kPackedAlignment);
  thread_local Arena arena;
  Status status = arena.reserve(scratch_bytes);
  if (!status.is_ok()) return status;
  const auto take = [&](size_t size) { return reinterpret_cast<float*>(arena.take(size * 4)); };
  for (const Part& part : parts_) {
    scratch.d_gate.push_back(take(scratch.num_rows * columns_of(part)));
    scratch.d_up.push_back(take(scratch.num_rows * columns_of(part)));
    scratch.d_weights.push_back(take(scratch.num_rows * part.num_gate_panels));
    if (sum_size > 0) scratch.sums.push_back(take(sum_size));
  }
  status = run_inner_grads(pool, routing, scratch, batch);
  if (status.is_ok()) status = run_input_grads(pool, routing, scratch, batch);
  if (status.is_ok()) sum_weight_grads(routing, scratch, batch);
  if (!status.is_ok() || parts_.size() == 1) return status;
  return pool.parallel_for((sum_size + kBackwardMergeChunk - 1) / kMergeChunk, 1,
                           [&](size_t begin, size_t end, int) {
                             std::vector<const float*> sums(scratch.sums.begin(),
                                                            scratch.sums.end());
                             const size_t first = begin * kBackwardMergeChunk;
                             for (const float*& sum : sums) sum += first;
                             kernels_->add_parts(sums.data(), sums.size(),
                                                 std::min(end * kBackwardMergeChunk, sum_size) - first,
                                                 batch.d_x + first);
                           });
}

Status ExpertBank::run_inner_grads(ThreadPool& pool, const Routing& routing,
                                   const GradScratch& scratch, const GradBatch& batch) const {
  const size_t num_threads = static_cast<size_t>(pool.num_threads());
  const size_t num_shares = std::max<size_t>(scratch.shares.size() * parts_.size(), 1);
  const size_t wanted = (kBackwardTasksPerThread * num_threads + num_shares - 1) / num_shares;
  const auto num_ranges = [&](const Part& part) {
    return std::clamp<size_t>(wanted, 1, part.num_gate_panels);
  };
  return run_parts(
      pool, [&](const Part& part) { return scratch.shares.size() * num_ranges(part); },
      [&](const PartTask& task) {
        const Part& part = parts_[task.part];
        const size_t range = task.item % num_ranges(part);
        const GradShare& share = scratch.shares[task.item / num_ranges(part)];
        const size_t first = part.num_gate_panels * range / num_ranges(part);
        const size_t last = part.num_gate_panels * (range + 1) / num_ranges(part);
        run_inner_task(routing, scratch, batch, share, task.part, first, last);
        return Status();
      });
}

void ExpertBank::run_inner_task(const Routing& routing, const GradScratch& scratch,
                                const GradBatch& batch, const GradShare& share, size_t part_id,
                                size_t first_panel, size_t last_panel) const {
  const Part& part = parts_[part_id];
  const size_t stride = share.stride, block = kPanelColumns * stride;
  const size_t hidden = num_down_panels_ * kPanelColumns;
  thread_local std::vector<float> memory;
  float* d_out = grow(memory, hidden * stride + 3 * block + 2 * kGradRows * kPanelColumns + stride);
  float* gate_t = d_out + hidden * stride;
  float* up_t = gate_t + block;
  float* dh = up_t + block;
  float* gate = dh + block;
  float* up = gate + kGradRows * kPanelColumns;
  float* weights = up + kGradRows * kPanelColumns;
  const int32_t* tokens = routing.tokens.data() + share.first_pair;
  std::fill(weights, weights + stride, 0.0f);
  std::copy_n(routing.weights.data() + share.first_pair, share.num_rows, weights);
  // Rows of the output's gradient, transposed; blocks of columns keep the reads in L1.
  std::fill(d_out + hidden_size_ * stride, d_out + hidden * stride, 0.0f);
  for (size_t c = 0; c < hidden_size_; ++c)
    std::fill(d_out + c * stride + share.num_rows, d_out + (c + 1) * stride, 0.0f);
  for (size_t first = 0; first < hidden_size_; first += 16)
    for (size_t r = 0; r < share.num_rows; ++r) {
      const float* row = batch.d_out + static_cast<size_t>(tokens[r]) * hidden_size_;
      for (size_t c = first; c < std::min(first + 16, hidden_size_); ++c)
        d_out[c * stride + r] = row[c];
    }
  const uint8_t* expert = part.data + share.expert_id * part.expert_bytes;
  const size_t size = padded_size(format_, hidden_size_);
  const size_t down_size = padded_size(format_, part.size);
  const size_t bias_row = whole_.num_gate_panels * kPanelColumns;
  for (size_t panel = first_panel; panel < last_panel; ++panel) {
    const size_t column = panel * kPanelColumns;
    float* d_gate = scratch.d_gate[part_id] +
                    share.offset * part.num_gate_panels * kPanelColumns + column * stride;
    float* d_up = scratch.d_up[part_id] + share.offset * part.num_gate_panels * kPanelColumns +
                  column * stride;
    float* d_weights = scratch.d_weights[part_id] + panel * scratch.num_rows + share.offset;
    std::fill(d_weights, d_weights + stride, 0.0f);
    for (size_t which = 0; which < 2; ++which) {
      float* out = which == 0 ? gate : up;
      kernels_->recompute({format_, size, hidden_size_, batch.x, hidden_size_, tokens,
                           share.num_rows, expert + (2 * panel + which) * hidden_panel_bytes_,
                           out});
      const std::vector<float>& biases = which == 0 ? gate_bias_ : up_bias_;
      if (!biases.empty()) {
        const float* bias = &biases[share.expert_id * bias_row + part.first + column];
        for (size_t r = 0; r < share.num_rows; ++r)
          for (size_t c = 0; c < kPanelColumns; ++c) out[r * kPanelColumns + c] += bias[c];
      }
      transpose(out, kPanelColumns, share.num_rows, kPanelColumns, stride,
                which == 0 ? gate_t : up_t);
    }
    std::fill(dh, dh + block, 0.0f);
    for (size_t k = column; k < std::min(column + kPanelColumns, down_size); k += kGradInputs)
      kernels_->multiply_back({format_, expert + part.gate_up_bytes, part.down_panel_bytes,
                               num_down_panels_, k, std::min(kGradInputs, down_size - k), d_out,
                               stride, dh + (k - column) * stride});
    kernels_->activate_back({activation_, block, stride, gate_t, up_t, dh, weights, d_gate, d_up,
                             d_weights});
    if (!down_bias_.empty() && part_id == 0 && panel == 0) {
      const float* bias = &down_bias_[share.expert_id * hidden];
      for (size_t c = 0; c < hidden_size_; ++c)
        for (size_t r = 0; r < share.num_rows; ++r)
          d_weights[r] += d_out[c * stride + r] * bias[c];
    }
  }
}

Status ExpertBank::run_input_grads(ThreadPool& pool, const Routing& routing,
                                   const GradScratch& scratch, const GradBatch& batch) const {
  const size_t size = padded_size(format_, hidden_size_);
  const size_t num_blocks = (hidden_size_ + kGradInputs - 1) / kGradInputs;
  return run_parts(
      pool, [&](const Part&) { return num_blocks; },
      [&](const PartTask& task) {
        const Part& part = parts_[task.part];
        const size_t first = task.item * kGradInputs;
        const size_t num_k = std::min(kGradInputs, size - first);
        const size_t num_columns = std::min(kGradInputs, hidden_size_ - first);
        float* sums = scratch.sums.empty() ? batch.d_x : scratch.sums[task.part];
        for (size_t token = 0; token < batch.num_tokens; ++token)
          std::memset(sums + token * hidden_size_ + first, 0, num_columns * sizeof(float));
        float out[kGradInputs * kGradRows];
        for (const GradShare& share : scratch.shares) {
          std::fill(out, out + kGradInputs * share.stride, 0.0f);
          const uint8_t* expert = part.data + share.expert_id * part.expert_bytes;
          const size_t at = share.offset * part.num_gate_panels * kPanelColumns;
          for (size_t which = 0; which < 2; ++which)
            kernels_->multiply_back(
                {format_, expert + which * hidden_panel_bytes_, 2 * hidden_panel_bytes_,
                 part.num_gate_panels, first, num_k,
                 (which == 0 ? scratch.d_gate : scratch.d_up)[task.part] + at, share.stride, out});
          for (size_t r = 0; r < share.num_rows; ++r) {
            const auto token = static_cast<size_t>(routing.tokens[share.first_pair + r]);
            float* row = sums + token * hidden_size_ + first;
            for (size_t c = 0; c < num_columns; ++c) row[c] += out[c * share.stride + r];
          }
        }
        return Status();
      });
}

void ExpertBank::sum_weight_grads(const Routing& routing, const GradScratch& scratch,
                                  const GradBatch& batch) const {
  std::fill_n(batch.d_weights, batch.num_tokens * batch.top_k, 0.0f);
  for (const GradShare& share : scratch.shares)
    for (size_t r = 0; r < share.num_rows; ++r) {
      float sum = 0.0f;
      for (size_t p = 0; p < parts_.size(); ++p)
        for (size_t panel = 0; panel < parts_[p].num_gate_panels; ++panel)
          sum += scratch.d_weights[p][panel * scratch.num_rows + share.offset + r];
      batch.d_weights[routing.slots[share.first_pair + r]] = sum;
    }
}

}  // namespace tandem
