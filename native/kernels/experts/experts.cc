#include "kernels/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/threads/thread_annotations.h"
#include "kernels/experts/experts_routing.h"
#include "kernels/linear/operand.h"
#include "kernels/weights/turned_panel.h"

namespace tandem {
namespace {

// Largest number of rows of an expert at which its weights are the main traffic from memory, so
// that a task should read a long piece of them.
constexpr size_t kFewRows = 8;
// Number of elements that one task adds up over the parts.
constexpr size_t kMergeChunk = 4096;

Status check_activation(const Activation& activation) {
  const bool is_silu = activation.kind == ActivationKind::kSilu;
  if (activation.limit > 0 && activation.alpha > 0 && std::isfinite(activation.alpha) &&
      std::isfinite(activation.up_offset) && (is_silu || activation.alpha == 1.0f))
    return {};
  return Error{Code::kConfig, "kernels.create_experts",
               "alpha " + std::to_string(activation.alpha) + ", limit " +
                   std::to_string(activation.limit) + ", up_offset " +
                   std::to_string(activation.up_offset) +
                   ": give a positive limit, a positive alpha (silu only) and a finite offset",
               "activation"};
}

}  // namespace

Result<ExpertBank> ExpertBank::plan(const Config& config) {
  const WeightFormat down_format = config.down_format.value_or(config.format);
  Status status = check_format(config.format);
  if (status.is_ok()) status = check_format(down_format);
  if (status.is_ok() && !(down_format == config.format) &&
      !(has_codes(config.format) && has_codes(down_format)))
    status = Error{Code::kUnsupported, "kernels.create_experts",
                   "another format of the down projections: both must be integer formats",
                   "down_format"};
  if (status.is_ok()) status = check_size(config.format, config.hidden_size, "hidden_size");
  if (status.is_ok())
    status = check_size(down_format, config.intermediate_size, "intermediate_size");
  if (status.is_ok()) status = check_activation(config.activation);
  if (!status.is_ok()) return status.error();
  if (config.num_experts == 0)
    return Error{Code::kConfig, "kernels.create_experts", "0 experts: give at least 1",
                 "num_experts"};
  Result<Isa> isa = choose_isa(config.isa);
  if (!isa.is_ok()) return isa.error();
  ExpertBank bank;
  bank.format_ = config.format;
  bank.down_format_ = down_format;
  bank.activation_ = config.activation;
  bank.isa_ = isa.value();
  bank.kernels_ = &packed_kernels(bank.isa_);
  bank.num_experts_ = config.num_experts;
  bank.hidden_size_ = config.hidden_size;
  bank.intermediate_size_ = config.intermediate_size;
  bank.hidden_panel_bytes_ = panel_bytes(config.format, config.hidden_size);
  bank.num_down_panels_ = count_panels(config.hidden_size);
  bank.whole_ = bank.plan_part(0, config.intermediate_size);
  const size_t part_size = bank.part_panels() * kPanelColumns;
  const size_t num_blocks = bank.whole_.num_gate_panels / bank.part_panels();
  if (config.num_parts == 0 || config.num_parts > num_blocks)
    return Error{Code::kConfig, "kernels.create_experts",
                 std::to_string(config.num_parts) + " parts of " + std::to_string(num_blocks) +
                     " column blocks: give 1 to " + std::to_string(num_blocks),
                 "num_parts"};
  if (!config.part_nodes.empty() && config.part_nodes.size() != config.num_parts)
    return Error{Code::kConfig, "kernels.create_experts",
                 std::to_string(config.part_nodes.size()) + " nodes for " +
                     std::to_string(config.num_parts) + " parts: give one for each",
                 "part_nodes"};
  for (size_t p = 0; p < config.num_parts; ++p) {
    const size_t first = num_blocks * p / config.num_parts * part_size;
    const size_t last = num_blocks * (p + 1) / config.num_parts * part_size;
    bank.parts_.push_back(
        bank.plan_part(first, std::min(last, config.intermediate_size) - first));
  }
  return bank;
}

ExpertBank::Part ExpertBank::plan_part(size_t first, size_t size) const {
  Part part;
  part.first = first;
  part.size = size;
  part.num_gate_panels = round_up(size, block_size()) / kPanelColumns;
  part.down_panel_bytes = panel_bytes(down_format_, size);
  part.gate_up_bytes = 2 * part.num_gate_panels * hidden_panel_bytes_;
  part.expert_bytes = part.gate_up_bytes + num_down_panels_ * part.down_panel_bytes;
  return part;
}

// Returns the number of gate (or up) panels of a block, whose columns are whole groups of the down
// projection's input.
size_t ExpertBank::block_panels() const {
  return std::max<size_t>(1, unit_size(down_format_) / kPanelColumns);
}

size_t ExpertBank::part_panels() const {
  return std::max(block_panels(), span_size(down_format_) / kPanelColumns);
}

size_t ExpertBank::expert_bytes() const {
  size_t sum = 0;
  for (const Part& part : parts_) sum += part.expert_bytes;
  return sum;
}

bool ExpertBank::is_bound() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.own && part.own->has_node(); });
}

Result<std::vector<int>> ExpertBank::find_part_nodes() const {
  std::vector<int> nodes;
  for (const Part& part : parts_) {
    Result<int> node = find_page_node(part.data);
    if (!node.is_ok()) return node.error();
    nodes.push_back(node.value());
  }
  return nodes;
}

Result<size_t> ExpertBank::count_bytes(const Config& config) {
  Result<ExpertBank> bank = plan(config);
  if (!bank.is_ok()) return bank.error();
  return config.num_experts * bank.value().expert_bytes();
}

Result<ExpertBank> ExpertBank::create(const Config& config) {
  Result<ExpertBank> planned = plan(config);
  if (!planned.is_ok()) return planned;
  ExpertBank& bank = planned.value();
  if (config.has_bias) {
    const size_t width = bank.whole_.num_gate_panels * kPanelColumns;
    bank.gate_bias_.assign(config.num_experts * width, 0.0f);
    bank.up_bias_.assign(config.num_experts * width, 0.0f);
    bank.down_bias_.assign(config.num_experts * bank.num_down_panels_ * kPanelColumns, 0.0f);
  }
  if (config.is_apart) {
    if (config.num_parts > 1 || config.storage)
      return Error{Code::kUnsupported, "kernels.create_experts",
                   "several parts, or storage, of weights that lie apart: use one part", "is_apart"};
    bank.is_apart_ = true;
    return planned;
  }
  if (config.storage) {
    if (config.num_parts > 1)
      return Error{Code::kUnsupported, "kernels.create_experts",
                   "storage for several parts: copy it with load()", "storage"};
    const size_t size_bytes = config.num_experts * bank.expert_bytes();
    Status status = check_storage(*config.storage, size_bytes, "kernels.create_experts");
    if (!status.is_ok()) return status.error();
    bank.storage_ = config.storage;
    bank.parts_[0].data = config.storage->data;
    return planned;
  }
  AlignedBuffer::Options options;
  options.hugepages = true;
  for (size_t p = 0; p < config.num_parts; ++p) {
    Part& part = bank.parts_[p];
    if (!config.part_nodes.empty()) options.numa_node = config.part_nodes[p];
    Result<AlignedBuffer> buffer =
        AlignedBuffer::allocate(config.num_experts * part.expert_bytes, options);
    if (!buffer.is_ok()) return buffer.error();
    part.own = std::make_unique<AlignedBuffer>(std::move(buffer.value()));
    part.data = part.own->data();
  }
  return planned;
}

Status ExpertBank::run_parts(ThreadPool& pool, FunctionRef<size_t(const Part&)> count,
                             FunctionRef<Status(const PartTask&)> run) const {
  const size_t num_nodes = parts_.size() > 1 ? static_cast<size_t>(pool.num_nodes()) : 1;
  std::vector<std::vector<PartTask>> tasks(num_nodes);
  for (size_t p = 0; p < parts_.size(); ++p) {
    std::vector<PartTask>& of_node = tasks[p * num_nodes / parts_.size()];
    const size_t num_items = count(parts_[p]);
    for (size_t item = 0; item < num_items; ++item) of_node.push_back({p, item});
  }
  size_t most = 0;
  for (const std::vector<PartTask>& of_node : tasks) most = std::max(most, of_node.size());
  if (most == 0) return {};
  Mutex mutex;
  Status status;
  const auto body = [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      const std::vector<PartTask>& of_node = tasks[i / most];
      if (i % most >= of_node.size()) continue;
      Status ran = run(of_node[i % most]);
      if (ran.is_ok()) continue;
      const MutexLock lock(mutex);
      if (status.is_ok()) status = std::move(ran);
    }
  };
  const Status submitted = num_nodes > 1 ? pool.parallel_for_nodes(most, 1, body)
                                         : pool.parallel_for(most, 1, body);
  return submitted.is_ok() ? status : submitted;
}

Status ExpertBank::pack(ThreadPool& pool, size_t expert_id, const MatrixView& gate,
                        const MatrixView& up, const MatrixView& down) {
  if (expert_id >= num_experts_)
    return {Code::kNotFound, "kernels.pack",
            "expert " + std::to_string(expert_id) + " of " + std::to_string(num_experts_),
            "expert_id"};
  if (!is_writable())
    return {Code::kConflict, "kernels.pack", "these weights are mapped read-only", "storage"};
  Status status = check_matrix(gate, intermediate_size_, hidden_size_, "gate");
  if (status.is_ok()) status = check_matrix(up, intermediate_size_, hidden_size_, "up");
  if (status.is_ok()) status = check_matrix(down, hidden_size_, intermediate_size_, "down");
  if (!status.is_ok()) return status;
  return run_parts(
      pool,
      [&](const Part& part) { return 2 * count_panels(part.size) + num_down_panels_; },
      [&](const PartTask& task) {
        return pack_part(parts_[task.part], expert_id, task.item, gate, up, down);
      });
}

Status ExpertBank::pack_part(const Part& part, size_t expert_id, size_t panel,
                             const MatrixView& gate, const MatrixView& up,
                             const MatrixView& down) const {
  uint8_t* expert = part.data + expert_id * part.expert_bytes;
  const size_t num_gate_up = 2 * count_panels(part.size);
  if (panel < num_gate_up)
    return pack_panel(
        *kernels_, format_,
        {panel % 2 == 0 ? &gate : &up, part.first + panel / 2 * kPanelColumns, 0, hidden_size_},
        expert + panel * hidden_panel_bytes_);
  panel -= num_gate_up;
  return pack_panel(*kernels_, down_format_,
                    {&down, panel * kPanelColumns, part.first, part.first + part.size},
                    expert + part.gate_up_bytes + panel * part.down_panel_bytes);
}

Status ExpertBank::load(ThreadPool& pool, const uint8_t* packed, size_t size_bytes) {
  if (!is_writable())
    return {Code::kConflict, "kernels.load", "these weights are mapped read-only", "storage"};
  if (size_bytes != num_experts_ * whole_.expert_bytes)
    return {Code::kShape, "kernels.load",
            std::to_string(size_bytes) + " packed bytes: give " +
                std::to_string(num_experts_ * whole_.expert_bytes),
            "packed"};
  return run_parts(
      pool, [&](const Part&) { return num_experts_; },
      [&](const PartTask& task) {
        copy_part(parts_[task.part], task.item, packed);
        return Status();
      });
}

// Copies a part of an expert from a bank with one part. Its gate and up panels are consecutive; of
// each down panel the part has a range of groups.
void ExpertBank::copy_part(const Part& part, size_t expert_id, const uint8_t* packed) const {
  const uint8_t* from = packed + expert_id * whole_.expert_bytes;
  uint8_t* to = part.data + expert_id * part.expert_bytes;
  std::memcpy(to, from + 2 * (part.first / kPanelColumns) * hidden_panel_bytes_,
              part.gate_up_bytes);
  from += whole_.gate_up_bytes;
  to += part.gate_up_bytes;
  const size_t body_bytes = group_bytes(down_format_, padded_size(down_format_, part.size));
  const size_t head_bytes = part.down_panel_bytes - body_bytes;
  const size_t skipped_bytes = group_bytes(down_format_, part.first);
  for (size_t i = 0; i < num_down_panels_; ++i) {
    std::memcpy(to, from, head_bytes);
    std::memcpy(to + head_bytes, from + head_bytes + skipped_bytes, body_bytes);
    from += whole_.down_panel_bytes;
    to += part.down_panel_bytes;
  }
}

Status ExpertBank::set_bias(size_t expert_id, const float* gate, const float* up,
                            const float* down) {
  if (expert_id >= num_experts_)
    return {Code::kNotFound, "kernels.set_bias",
            "expert " + std::to_string(expert_id) + " of " + std::to_string(num_experts_),
            "expert_id"};
  if (gate_bias_.empty())
    return {Code::kConflict, "kernels.set_bias", "made without biases: ask for them when creating",
            "has_bias"};
  const size_t width = whole_.num_gate_panels * kPanelColumns;
  std::copy_n(gate, intermediate_size_, gate_bias_.data() + expert_id * width);
  std::copy_n(up, intermediate_size_, up_bias_.data() + expert_id * width);
  std::copy_n(down, hidden_size_,
              down_bias_.data() + expert_id * num_down_panels_ * kPanelColumns);
  return {};
}

Result<ExpertBank::Routing> ExpertBank::route(const Batch& batch) const {
  const size_t num_slots = batch.num_tokens * batch.top_k;
  const auto id_at = [&](size_t i) -> int64_t {
    return batch.has_int64_ids ? static_cast<const int64_t*>(batch.expert_ids)[i]
                               : static_cast<const int32_t*>(batch.expert_ids)[i];
  };
  std::vector<size_t> next(num_experts_, 0);
  for (size_t i = 0; i < num_slots; ++i) {
    const int64_t id = id_at(i);
    if (id < -1 || id >= static_cast<int64_t>(num_experts_))
      return Error{Code::kShape, "kernels.run_experts",
                   "expert id " + std::to_string(id) + " of " + std::to_string(num_experts_) +
                       " experts: pass -1 for one that is elsewhere",
                   "expert_ids"};
    if (id < 0) continue;
    const size_t e = static_cast<size_t>(id);
    if (e < batch.first_expert || e >= batch.end_expert) continue;
    if (is_apart_ && (batch.addresses == nullptr || batch.addresses[e] == nullptr))
      return Error{Code::kConflict, "kernels.run_experts",
                   "expert " + std::to_string(id) + " is not in memory: read it first",
                   "addresses"};
    ++next[e];
  }
  Routing routing;
  size_t num_pairs = 0;
  for (size_t e = 0; e < num_experts_; ++e) {
    const size_t count = next[e];
    next[e] = num_pairs;
    if (count > 0) routing.active.push_back({e, num_pairs, count});
    num_pairs += count;
  }
  routing.tokens.resize(num_pairs);
  routing.weights.resize(num_pairs);
  routing.slots.resize(num_pairs);
  for (size_t i = 0; i < num_slots; ++i) {
    const int64_t id = id_at(i);
    if (id < static_cast<int64_t>(batch.first_expert) ||
        static_cast<uint64_t>(id) >= batch.end_expert)
      continue;
    const size_t pair = next[static_cast<size_t>(id)]++;
    routing.tokens[pair] = static_cast<int32_t>(i / batch.top_k);
    routing.weights[pair] = batch.weights[i];
    routing.slots[pair] = static_cast<int32_t>(i);
  }
  return routing;
}

const uint8_t* ExpertBank::find_expert(const Part& part, const Scratch& scratch,
                                       size_t expert_id) const {
  return is_apart_ ? scratch.addresses[expert_id] : part.data + expert_id * part.expert_bytes;
}

Status ExpertBank::forward(ThreadPool& pool, const Batch& batch) const {
  if (batch.num_tokens == 0) return {};
  if (batch.is_added && parts_.size() > 1)
    return {Code::kConflict, "kernels.run_experts", "parts cannot add to a sum", "is_added"};
  Result<Routing> routed = route(batch);
  if (!routed.is_ok()) return routed.error();
  const Routing& routing = routed.value();
  thread_local Arena arena;
  const size_t num_pairs = routing.tokens.size();
  const size_t hidden_row = padded_size(format_, hidden_size_);
  const size_t sum_size = parts_.size() > 1 ? batch.num_tokens * hidden_size_ : 0;
  size_t scratch_bytes = operand_bytes(format_, batch.num_tokens, hidden_row) + kPackedAlignment;
  for (const Part& part : parts_)
    scratch_bytes += operand_bytes(down_format_, num_pairs, part.num_gate_panels * kPanelColumns) +
                     round_up(sum_size * sizeof(float), kPackedAlignment);
  Status status = arena.reserve(scratch_bytes);
  if (!status.is_ok()) return status;
  Scratch scratch;
  scratch.delta = batch.delta;
  scratch.kept = batch.kept;
  scratch.addresses = batch.addresses;
  scratch.x = take_operand(arena, format_, batch.num_tokens, hidden_row);
  for (const Part& part : parts_) {
    scratch.h.push_back(
        take_operand(arena, down_format_, num_pairs, part.num_gate_panels * kPanelColumns));
    if (sum_size > 0)
      scratch.sums.push_back(reinterpret_cast<float*>(arena.take(sum_size * sizeof(float))));
  }
  status = prepare_rows(
      pool, *kernels_,
      {format_, batch.x, batch.is_bf16, hidden_size_, 0, batch.num_tokens, scratch.x});
  if (status.is_ok()) status = run_gate_up(pool, routing, scratch);
  if (status.is_ok()) status = run_down(pool, routing, scratch, batch);
  if (status.is_ok() && parts_.size() > 1)
    status = merge_parts(pool, scratch.sums, batch.num_tokens, batch.out);
  return status;
}

Status ExpertBank::run_gate_up(ThreadPool& pool, const Routing& routing,
                               const Scratch& scratch) const {
  struct Share {
    size_t expert_id;
    size_t first_pair;
    size_t num_pairs;
  };
  std::vector<Share> shares;
  size_t most_pairs = 0;
  for (const Routing::Active& active : routing.active) {
    const size_t num_shares = (active.num_pairs + kMaxTaskRows - 1) / kMaxTaskRows;
    most_pairs = std::max(most_pairs, active.num_pairs);
    for (size_t i = 0; i < num_shares; ++i) {
      const size_t begin = active.num_pairs * i / num_shares;
      const size_t end = active.num_pairs * (i + 1) / num_shares;
      shares.push_back({active.expert_id, active.first_pair + begin, end - begin});
    }
  }
  // Sort the longest shares first, so that the tasks that end last are short.
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.num_pairs > b.num_pairs; });
  const size_t panels = block_panels();
  // Blocks of an expert are adjacent in memory, so a task that takes several reads one long stream.
  const size_t num_pieces = shares.size() * whole_.num_gate_panels / panels;
  const size_t task_blocks = most_pairs <= kFewRows ? pieces_per_task(pool, num_pieces) : 1;
  const size_t block_bytes = 2 * panels * hidden_panel_bytes_;
  const size_t bias_row = whole_.num_gate_panels * kPanelColumns;
  const auto num_ranges = [&](const Part& part) {
    return (part.num_gate_panels / panels + task_blocks - 1) / task_blocks;
  };
  return run_parts(
      pool, [&](const Part& part) { return shares.size() * num_ranges(part); },
      [&](const PartTask& task) {
        const Part& part = parts_[task.part];
        const Share& share = shares[task.item / num_ranges(part)];
        const size_t first = task.item % num_ranges(part) * task_blocks;
        const size_t last = std::min(first + task_blocks, part.num_gate_panels / panels);
        for (size_t block = first; block < last; ++block) {
          const size_t column = block * block_size();
          const size_t bias_at = share.expert_id * bias_row + part.first + column;
          const size_t at = part.first + column;
          const float* delta = scratch.delta == nullptr ? nullptr : scratch.delta + at;
          void* kept = scratch.kept == nullptr ? nullptr
                                               : static_cast<uint8_t*>(scratch.kept) +
                                                     at * gradient_bytes(format_);
          kernels_->gate_up(
              {
                  .format = format_,
                  .activation = activation_,
                  .size = scratch.x.row_size,
                  .x = scratch.x,
                  .row_ids = routing.tokens.data() + share.first_pair,
                  .num_rows = share.num_pairs,
                  .panels = find_expert(part, scratch, share.expert_id) + block * block_bytes,
                  .panel_bytes = hidden_panel_bytes_,
                  .num_panels = panels,
                  .gate_bias = gate_bias_.empty() ? nullptr : &gate_bias_[bias_at],
                  .up_bias = up_bias_.empty() ? nullptr : &up_bias_[bias_at],
                  .h_format = down_format_,
                  .h = scratch.h[task.part],
                  .first_row = share.first_pair,
                  .first_column = column,
                  .delta = delta,
                  .kept = kept,
                  .kept_columns = inner_columns()});
        }
        return Status();
      });
}

Status ExpertBank::run_down(ThreadPool& pool, const Routing& routing, const Scratch& scratch,
                            const Batch& batch) const {
  const size_t task_panels = pieces_per_task(pool, num_down_panels_ * parts_.size());
  return run_parts(
      pool, [&](const Part&) { return (num_down_panels_ + task_panels - 1) / task_panels; },
      [&](const PartTask& task) {
        const Part& part = parts_[task.part];
        const size_t first = task.item * task_panels;
        const size_t num_panels = std::min(task_panels, num_down_panels_ - first);
        const size_t column = first * kPanelColumns;
        std::vector<ExpertRows> experts(routing.active.size());
        for (size_t e = 0; e < experts.size(); ++e) {
          const Routing::Active& active = routing.active[e];
          // The bias is added once, by the first part.
          const float* bias =
              down_bias_.empty() || task.part > 0
                  ? nullptr
                  : &down_bias_[active.expert_id * num_down_panels_ * kPanelColumns + column];
          experts[e] = {find_expert(part, scratch, active.expert_id) + part.gate_up_bytes +
                            first * part.down_panel_bytes,
                        bias, active.first_pair, active.num_pairs};
        }
        float* out = scratch.sums.empty() ? batch.out : const_cast<float*>(scratch.sums[task.part]);
        kernels_->down({
            .format = down_format_,
            .size = padded_size(down_format_, part.size),
            .h = scratch.h[task.part],
            .experts = experts.data(),
            .num_experts = experts.size(),
            .panel_bytes = part.down_panel_bytes,
            .num_panels = num_panels,
            .tokens = routing.tokens.data(),
            .weights = routing.weights.data(),
            .out = out + column,
            .out_stride = hidden_size_,
            .num_tokens = batch.num_tokens,
            .num_columns = std::min(num_panels * kPanelColumns, hidden_size_ - column),
            .is_added = batch.is_added});
        return Status();
      });
}

Status ExpertBank::merge_parts(ThreadPool& pool, const std::vector<const float*>& sums,
                               size_t num_tokens, float* out) const {
  const size_t size = num_tokens * hidden_size_;
  const auto merge = [&](size_t begin, size_t end) {
    std::vector<const float*> from = sums;
    for (const float*& sum : from) sum += begin;
    kernels_->add_parts(from.data(), from.size(), end - begin, out + begin);
  };
  const size_t num_tasks = (size + kMergeChunk - 1) / kMergeChunk;
  if (num_tasks == 1) {
    merge(0, size);
    return {};
  }
  return pool.parallel_for(num_tasks, 1, [&](size_t begin, size_t end, int) {
    merge(begin * kMergeChunk, std::min(end * kMergeChunk, size));
  });
}

Status ExpertBank::read_weights(ThreadPool& pool, size_t num_experts) const {
  if (is_apart_)
    return {Code::kConflict, "kernels.read_weights", "these weights lie apart", "num_experts"};
  for (const Part& part : parts_) {
    Status status = read_packed(pool, *kernels_, part.data, num_experts * part.expert_bytes);
    if (!status.is_ok()) return status;
  }
  return {};
}

Status ExpertBank::multiply_registers(ThreadPool& pool, size_t num_macs) const {
  return multiply_packed(pool, *kernels_, format_, num_macs);
}

}  // namespace tandem
