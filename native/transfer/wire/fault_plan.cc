#include "transfer/wire/fault_plan.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace tandem::transfer {
namespace {

class FaultyMapping : public Mapping {
 public:
  FaultyMapping(std::shared_ptr<Mapping> mapping, std::shared_ptr<FaultPlan> plan)
      : mapping_(std::move(mapping)), plan_(std::move(plan)) {}
  TransportKind kind() const override { return mapping_->kind(); }

 protected:
  Status copy_held(Op op, uint8_t* local, uint64_t offset, uint64_t length) override {
    const Error failed{Code::kInternal, "transfer.fault", "a fault was asked for", ""};
    switch (plan_->next()) {
      case Fault::kNone:
        break;
      case Fault::kDrop:
        return failed;
      case Fault::kCorrupt: {
        std::vector<uint8_t> wrong(length, 0xA5);
        if (op == Op::kRead)
          std::copy(wrong.begin(), wrong.end(), local);
        else if (Status status = mapping_->copy(op, wrong.data(), offset, length); !status.is_ok())
          return status;
        return failed;
      }
      case Fault::kDuplicate:
        if (Status status = mapping_->copy(op, local, offset, length); !status.is_ok())
          return status;
        break;
      case Fault::kReorder: {
        const uint64_t half = length / 2;
        Status status = mapping_->copy(op, local + half, offset + half, length - half);
        return status.is_ok() ? mapping_->copy(op, local, offset, half) : status;
      }
      case Fault::kDelay:
        std::this_thread::sleep_for(std::chrono::nanoseconds(plan_->delay_ns()));
        break;
    }
    return mapping_->copy(op, local, offset, length);
  }

 private:
  const std::shared_ptr<Mapping> mapping_;
  const std::shared_ptr<FaultPlan> plan_;
};

}  // namespace

Fault FaultPlan::next() {
  const MutexLock lock(mutex_);
  double draw = std::uniform_real_distribution<double>(0, 1)(random_);
  Fault fault = Fault::kNone;
  const std::pair<double, Fault> choices[] = {{rates_.drop, Fault::kDrop},
                                              {rates_.corrupt, Fault::kCorrupt},
                                              {rates_.duplicate, Fault::kDuplicate},
                                              {rates_.reorder, Fault::kReorder},
                                              {rates_.delay, Fault::kDelay}};
  for (const auto& [rate, choice] : choices) {
    if (draw < rate) {
      fault = choice;
      break;
    }
    draw -= rate;
  }
  if (rates_.is_dead) fault = Fault::kDrop;
  num_faults_ += fault != Fault::kNone;
  return fault;
}

uint64_t FaultPlan::num_faults() const {
  const MutexLock lock(mutex_);
  return num_faults_;
}

std::shared_ptr<Mapping> make_faulty_mapping(std::shared_ptr<Mapping> mapping,
                                             std::shared_ptr<FaultPlan> plan) {
  return std::make_shared<FaultyMapping>(std::move(mapping), std::move(plan));
}

}  // namespace tandem::transfer
