#include "kernels/experts.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/experts_kernels.h"

namespace tandem {
namespace {

// Rows of one gate-up task: more are split, so that one popular expert still occupies all threads.
constexpr size_t kMaxTaskRows = 192;
// Below, coding the input takes less than waking the pool does.
constexpr size_t kMinParallelTokens = 8;
constexpr size_t kAlignment = 64;

size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

const ExpertKernels& kernels_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2: return kExpertsAvx2;
    case Isa::kAvx512Bw: return kExpertsAvx512Bw;
    case Isa::kAvx512Vnni: return kExpertsAvx512Vnni;
    case Isa::kAvx512Bf16: return kExpertsAvx512Bf16;
#endif
    default: return kExpertsPlain;
  }
}

// Memory that grows and stays, one per calling thread: a layer's scratch is the next layer's, and
// fresh pages would cost more than the work of a small batch.
class Arena {
 public:
  Status reserve(size_t size_bytes) {
    used_ = 0;
    if (buffer_ && buffer_->size_bytes() >= size_bytes) return {};
    buffer_.reset();
    Result<AlignedBuffer> made = AlignedBuffer::allocate(size_bytes, {});
    if (!made.is_ok()) return made.error();
    buffer_ = std::make_unique<AlignedBuffer>(std::move(made.value()));
    return {};
  }
  uint8_t* take(size_t size_bytes) {
    uint8_t* p = buffer_->data() + used_;
    used_ += round_up(size_bytes, kAlignment);
    return p;
  }

 private:
  std::unique_ptr<AlignedBuffer> buffer_;
  size_t used_ = 0;
};

size_t row_groups(const WeightFormat& format, size_t row_size) {
  return format.bits == 16 ? 0 : row_size / static_cast<size_t>(format.group_size);
}

size_t operand_bytes(const WeightFormat& format, size_t rows, size_t row_size) {
  const size_t row_bytes = row_size * (format.bits == 16 ? 2 : 1);
  return round_up(rows * row_bytes, kAlignment) +
         2 * round_up(rows * row_groups(format, row_size) * 4, kAlignment);
}

Operand take_operand(Arena& arena, const WeightFormat& format, size_t rows, size_t row_size) {
  Operand operand{};
  operand.row_bytes = row_size * (format.bits == 16 ? 2 : 1);
  operand.data = arena.take(rows * operand.row_bytes);
  operand.num_groups = row_groups(format, row_size);
  const size_t num_words = rows * operand.num_groups;
  operand.scales = reinterpret_cast<float*>(arena.take(num_words * 4));
  uint8_t* extra = arena.take(num_words * 4);
  if (format.has_minimum)
    operand.offsets = reinterpret_cast<float*>(extra);
  else
    operand.corrections = reinterpret_cast<int32_t*>(extra);
  return operand;
}

}  // namespace

// The (token, slot) pairs sorted by expert; within an expert by token, then slot.
struct ExpertBank::Routing {
  struct Active {
    size_t expert_id;
    size_t first_pair;
    size_t num_pairs;
  };
  std::vector<Active> active;  // Ascending expert ids.
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};

struct ExpertBank::Scratch {
  Operand x;
  Operand h;
};

Result<ExpertBank> ExpertBank::plan(const Config& config) {
  Status status = check_format(config.format);
  if (status.is_ok()) status = check_size(config.format, config.hidden_size, "hidden_size");
  if (status.is_ok())
    status = check_size(config.format, config.intermediate_size, "intermediate_size");
  if (!status.is_ok()) return status.error();
  if (config.num_experts == 0)
    return Error{Code::kConfig, "kernels.create_experts", "0 experts: give at least 1",
                 "num_experts"};
  Result<Isa> isa = choose_isa(config.isa);
  if (!isa.is_ok()) return isa.error();
  ExpertBank bank;
  bank.format_ = config.format;
  bank.isa_ = isa.value();
  bank.kernels_ = &kernels_of(bank.isa_);
  bank.num_experts_ = config.num_experts;
  bank.hidden_size_ = config.hidden_size;
  bank.intermediate_size_ = config.intermediate_size;
  bank.hidden_panel_bytes_ = panel_bytes(config.format, config.hidden_size);
  bank.intermediate_panel_bytes_ = panel_bytes(config.format, config.intermediate_size);
  bank.num_gate_panels_ = round_up(config.intermediate_size,
                                   kPanelColumns * bank.panels_per_block()) / kPanelColumns;
  bank.num_down_panels_ = round_up(config.hidden_size, kPanelColumns) / kPanelColumns;
  bank.gate_up_bytes_ = 2 * bank.num_gate_panels_ * bank.hidden_panel_bytes_;
  bank.down_bytes_ = bank.num_down_panels_ * bank.intermediate_panel_bytes_;
  return bank;
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
  const size_t size_bytes = config.num_experts * bank.expert_bytes();
  if (config.storage) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(config.storage->data) % kAlignment == 0;
    if (config.storage->size_bytes != size_bytes || !is_aligned)
      return Error{Code::kShape, "kernels.create_experts",
                   "storage of " + std::to_string(config.storage->size_bytes) +
                       (is_aligned ? " bytes" : " bytes, not 64-byte aligned") + ": give " +
                       std::to_string(size_bytes) + " aligned bytes",
                   "storage"};
    bank.storage_ = config.storage;
    bank.data_ = config.storage->data;
    return planned;
  }
  AlignedBuffer::Options options;
  options.hugepages = true;
  Result<AlignedBuffer> buffer = AlignedBuffer::allocate(size_bytes, options);
  if (!buffer.is_ok()) return buffer.error();
  bank.own_ = std::make_unique<AlignedBuffer>(std::move(buffer.value()));
  bank.data_ = bank.own_->data();
  return planned;
}

// A block of gate-up columns holds whole groups of down's input.
size_t ExpertBank::panels_per_block() const {
  return std::max<size_t>(1, static_cast<size_t>(format_.group_size) / kPanelColumns);
}

Status ExpertBank::pack(ThreadPool& pool, size_t expert_id, const MatrixView& gate,
                        const MatrixView& up, const MatrixView& down) {
  if (expert_id >= num_experts_)
    return {Code::kNotFound, "kernels.pack",
            "expert " + std::to_string(expert_id) + " of " + std::to_string(num_experts_),
            "expert_id"};
  if (!is_writable())
    return {Code::kConflict, "kernels.pack", "these weights are mapped read-only", "storage"};
  const auto check = [](const MatrixView& matrix, size_t rows, size_t columns, const char* name) {
    if (matrix.rows == rows && matrix.columns == columns) return Status();
    return Status(Code::kShape, "kernels.pack",
                  std::string(name) + " is [" + std::to_string(matrix.rows) + ", " +
                      std::to_string(matrix.columns) + "], wanted [" + std::to_string(rows) +
                      ", " + std::to_string(columns) + "]",
                  name);
  };
  Status status = check(gate, intermediate_size_, hidden_size_, "gate");
  if (status.is_ok()) status = check(up, intermediate_size_, hidden_size_, "up");
  if (status.is_ok()) status = check(down, hidden_size_, intermediate_size_, "down");
  if (!status.is_ok()) return status;
  uint8_t* gate_up_panels = data_ + expert_id * expert_bytes();
  uint8_t* down_panels = gate_up_panels + gate_up_bytes_;
  const size_t num_gate_up = 2 * ((intermediate_size_ + kPanelColumns - 1) / kPanelColumns);
  std::mutex mutex;
  const auto pack_one = [&](size_t i) {
    if (i < num_gate_up)
      return pack_panel(format_, i % 2 == 0 ? gate : up, i / 2 * kPanelColumns,
                        gate_up_panels + i * hidden_panel_bytes_);
    const size_t panel = i - num_gate_up;
    return pack_panel(format_, down, panel * kPanelColumns,
                      down_panels + panel * intermediate_panel_bytes_);
  };
  const Status ran = pool.parallel_for(
      num_gate_up + num_down_panels_, 1, [&](size_t begin, size_t end, int) {
        for (size_t i = begin; i < end; ++i) {
          Status packed = pack_one(i);
          if (packed.is_ok()) continue;
          const std::lock_guard lock(mutex);
          if (status.is_ok()) status = std::move(packed);
        }
      });
  return ran.is_ok() ? status : ran;
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
    if (id >= 0) ++next[static_cast<size_t>(id)];
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
  for (size_t i = 0; i < num_slots; ++i) {
    const int64_t id = id_at(i);
    if (id < 0) continue;
    const size_t pair = next[static_cast<size_t>(id)]++;
    routing.tokens[pair] = static_cast<int32_t>(i / batch.top_k);
    routing.weights[pair] = batch.weights[i];
  }
  return routing;
}

Status ExpertBank::forward(ThreadPool& pool, const Batch& batch) const {
  if (batch.num_tokens == 0) return {};
  Result<Routing> routed = route(batch);
  if (!routed.is_ok()) return routed.error();
  const Routing& routing = routed.value();
  thread_local Arena arena;
  const size_t num_pairs = routing.tokens.size();
  const size_t hidden_row = round_up(hidden_size_, 2);
  const size_t intermediate_row = num_gate_panels_ * kPanelColumns;
  Status status = arena.reserve(operand_bytes(format_, batch.num_tokens, hidden_row) +
                                operand_bytes(format_, num_pairs, intermediate_row) + kAlignment);
  if (!status.is_ok()) return status;
  const Scratch scratch{take_operand(arena, format_, batch.num_tokens, hidden_row),
                        take_operand(arena, format_, num_pairs, intermediate_row)};
  const auto prepare = [&](size_t begin, size_t end, int) {
    kernels_->prepare({format_, batch.x, batch.is_bf16, hidden_size_, begin, end, scratch.x});
  };
  if (batch.num_tokens < kMinParallelTokens)
    prepare(0, batch.num_tokens, 0);
  else
    status = pool.parallel_for(batch.num_tokens, kMinParallelTokens / 2, prepare);
  if (status.is_ok()) status = run_gate_up(pool, routing, scratch);
  if (status.is_ok()) status = run_down(pool, routing, scratch, batch);
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
  for (const Routing::Active& active : routing.active) {
    const size_t num_shares = (active.num_pairs + kMaxTaskRows - 1) / kMaxTaskRows;
    for (size_t i = 0; i < num_shares; ++i) {
      const size_t begin = active.num_pairs * i / num_shares;
      const size_t end = active.num_pairs * (i + 1) / num_shares;
      shares.push_back({active.expert_id, active.first_pair + begin, end - begin});
    }
  }
  // Longest first, so that the last tasks to end are short ones.
  std::stable_sort(shares.begin(), shares.end(),
                   [](const Share& a, const Share& b) { return a.num_pairs > b.num_pairs; });
  const size_t block_panels = panels_per_block();
  const size_t num_blocks = num_gate_panels_ / block_panels;
  const size_t block_bytes = 2 * block_panels * hidden_panel_bytes_;
  return pool.parallel_for(
      shares.size() * num_blocks, 1, [&](size_t begin, size_t end, int) {
        for (size_t i = begin; i < end; ++i) {
          const Share& share = shares[i / num_blocks];
          const size_t block = i % num_blocks;
          const uint8_t* panels =
              data_ + share.expert_id * expert_bytes() + block * block_bytes;
          kernels_->gate_up({format_, hidden_size_, scratch.x,
                             routing.tokens.data() + share.first_pair, share.num_pairs, panels,
                             hidden_panel_bytes_, block_panels, scratch.h, share.first_pair,
                             block * block_panels * kPanelColumns});
        }
      });
}

Status ExpertBank::run_down(ThreadPool& pool, const Routing& routing, const Scratch& scratch,
                            const Batch& batch) const {
  return pool.parallel_for(num_down_panels_, 1, [&](size_t begin, size_t end, int) {
    std::vector<ExpertRows> experts(routing.active.size());
    for (size_t i = begin; i < end; ++i) {
      for (size_t e = 0; e < experts.size(); ++e) {
        const Routing::Active& active = routing.active[e];
        experts[e] = {data_ + active.expert_id * expert_bytes() + gate_up_bytes_ +
                          i * intermediate_panel_bytes_,
                      active.first_pair, active.num_pairs};
      }
      const size_t column = i * kPanelColumns;
      kernels_->down({format_, intermediate_size_, scratch.h, experts.data(), experts.size(),
                      routing.tokens.data(), routing.weights.data(), batch.out + column,
                      hidden_size_, batch.num_tokens,
                      std::min(kPanelColumns, hidden_size_ - column)});
    }
  });
}

Status ExpertBank::read_weights(ThreadPool& pool, size_t num_experts) const {
  constexpr size_t kReadBytes = 256 << 10;
  const size_t size_bytes = num_experts * expert_bytes() / 256 * 256;
  std::atomic<int32_t> sink{0};
  return pool.parallel_for((size_bytes + kReadBytes - 1) / kReadBytes, 1,
                           [&](size_t begin, size_t end, int) {
                             const size_t first = begin * kReadBytes;
                             const size_t last = std::min(end * kReadBytes, size_bytes);
                             sink += kernels_->read_memory(data_ + first, last - first);
                           });
}

Status ExpertBank::multiply_registers(ThreadPool& pool, size_t num_macs) const {
  constexpr size_t kTaskSteps = 4096;
  const size_t step_macs = format_.bits == 16 ? kBf16StepMacs : kIntStepMacs;
  const size_t num_tasks = (num_macs + step_macs * kTaskSteps - 1) / (step_macs * kTaskSteps);
  // Tasks of equal size, which together perform what was asked for.
  const size_t steps = num_macs / step_macs / std::max<size_t>(num_tasks, 1);
  std::atomic<int32_t> sink{0};
  return pool.parallel_for(num_tasks, 1, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) sink += kernels_->multiply_registers(format_.bits, steps);
  });
}

}  // namespace tandem
