#include "kernels/weights/packing.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/threads/thread_annotations.h"
#include "kernels/weights/weight_memory.h"

namespace tandem {
namespace {

// Least number of tasks per thread, for balance; only beyond it are several pieces joined to one
// task.
constexpr size_t kPackTasksPerThread = 6;
constexpr size_t kMaxTaskPieces = 4;
// Largest number of inputs whose products an int32 can sum: 2^31 / (255 * 127), in whole groups.
constexpr size_t kMaxIntSize = 65536;

constexpr WeightFormat kStoredFormats[] = {
    // Formats in superblocks, with a table, or with a codebook.
    {4, 32, true, false, 6},
    {5, 32, true, false, 6},
    {6, 16, false, false, 8},
    {2, 16, true, false, 4},
    {3, 16, false, false, 6},
    {4, 32, false, false, 6, CodeTable::kIq4Nl},
    {4, 32, false, false, 0, CodeTable::kIq4Nl},
    {4, 16, false, false, 0, CodeTable::kE2m1},
    {2, 32, false, false, 4, CodeTable::kIq2Xxs},
    {2, 16, false, false, 4, CodeTable::kIq2Xs},
    {2, 16, false, false, 4, CodeTable::kIq2S},
    {3, 32, false, false, 4, CodeTable::kIq3Xxs},
    {3, 32, false, false, 4, CodeTable::kIq3S},
};

// Returns the bytes of scales and minima before the codes of a group, of a superblock, or of a
// panel with one scale per row.
size_t header_bytes(const WeightFormat& format) {
  if (format.is_float) return format.group_size == 0 ? kRowHeaderBytes : kFloatHeaderBytes;
  if (format.table == CodeTable::kE2m1) return kPanelColumns;
  if (format.has_zeros) return kPanelColumns * 2 + kPanelColumns / 2;
  const size_t level_bits = count_levels(format) * static_cast<size_t>(format.scale_bits);
  return kPanelColumns * (2 * (format.has_minimum ? 2 : 1) + level_bits / 8);
}

}  // namespace

bool has_codes(const WeightFormat& format) { return format.bits < 16 && !format.is_float; }

size_t unit_size(const WeightFormat& format) {
  if (format.bits >= 16) return 32 / static_cast<size_t>(format.bits);
  return static_cast<size_t>(format.group_size == 0 ? kRowGroupSize : format.group_size);
}

size_t span_size(const WeightFormat& format) {
  return format.scale_bits != 0 ? kSuperblockSize : unit_size(format);
}

size_t count_levels(const WeightFormat& format) {
  const bool is_aside = format.table == CodeTable::kIq2Xxs || format.table == CodeTable::kIq3Xxs;
  if (format.scale_bits == 0 || is_aside) return 0;
  return kSuperblockSize / static_cast<size_t>(format.group_size) * (format.has_minimum ? 2 : 1);
}

Status check_format(const WeightFormat& format) {
  const auto is_same = [&](const WeightFormat& other) { return other == format; };
  if (std::any_of(std::begin(kStoredFormats), std::end(kStoredFormats), is_same)) return {};
  const bool is_stored = format.scale_bits != 0 || format.table != CodeTable::kNone;
  const bool fits_zeros = format.bits == 4 && format.has_minimum && !format.is_float && !is_stored;
  const int g = format.group_size;
  const bool is_group = g == 32 || g == 64 || g == 128 || (g == 16 && format.bits == 8);
  const bool is_value = format.bits == 32 || format.bits == 16;
  if (is_value && g == 0 && !format.has_minimum && !is_stored) return {};
  if (is_stored || (format.has_zeros && !fits_zeros)) {
    // A format that is stored in files, or that has zero points, has no kernel unless it is listed
    // above.
  } else if (format.is_float && !format.has_minimum) {
    if ((format.bits == 8 && (g == 128 || g == 0)) || (format.bits == 4 && g == 32)) return {};
  } else if (!format.is_float) {
    if ((format.bits == 8 || format.bits == 4) && is_group) return {};
    if (format.bits == 5 && g == 32) return {};
    if (format.bits == 8 && g == 0 && !format.has_minimum) return {};
  }
  return Error{Code::kUnsupported, "kernels.check_format",
               std::to_string(format.bits) + " bits in groups of " + std::to_string(g) +
                   ": there are kernels for fp32, bf16, e4m3 in blocks of 128 or in rows, e2m1 in groups of 32, 8 "
                   "bits in groups of 16 to 128 or in rows, 5 bits in groups of 32, 4 bits in groups of 32 "
                   "to 128, and for NVFP4 and GGUF's superblocks, tables and codebooks",
               "format"};
}

Status check_size(const WeightFormat& format, size_t size, const char* name) {
  const bool wants_groups = has_codes(format) && format.group_size != 0;
  const bool is_whole = !wants_groups || size % span_size(format) == 0;
  if (size > 0 && is_whole && (!has_codes(format) || size <= kMaxIntSize)) return {};
  if (size > kMaxIntSize)
    return Error{Code::kShape, "kernels.check_size",
                 std::string(name) + " " + std::to_string(size) + " is beyond " +
                     std::to_string(kMaxIntSize) + ", what integer formats take: choose bf16 or fp8",
                 name};
  return Error{Code::kShape, "kernels.check_size",
               std::string(name) + " " + std::to_string(size) +
                   " is not a multiple of the group of " + std::to_string(span_size(format)) +
                   " weights: choose a smaller group, or bf16",
               name};
}

Status check_matrix(const MatrixView& matrix, size_t rows, size_t columns, const char* name) {
  if (matrix.rows == rows && matrix.columns == columns) return {};
  return Error{Code::kShape, "kernels.pack",
               std::string(name) + " is [" + std::to_string(matrix.rows) + ", " +
                   std::to_string(matrix.columns) + "], wanted [" + std::to_string(rows) + ", " +
                   std::to_string(columns) + "]",
               name};
}

size_t padded_size(const WeightFormat& format, size_t size) {
  return round_up(size, unit_size(format));
}

size_t code_bytes(const WeightFormat& format, size_t num_inputs) {
  const bool has_upper = format.table == CodeTable::kIq2S || format.table == CodeTable::kIq3S;
  const size_t upper = has_upper ? kPanelColumns * num_inputs / 32 : 0;
  return kPanelColumns * num_inputs * static_cast<size_t>(format.bits) / 8 + upper;
}

size_t group_bytes(const WeightFormat& format, size_t num_inputs) {
  const size_t codes = code_bytes(format, num_inputs);
  if (format.bits >= 16 || format.group_size == 0) return codes;
  return codes + num_inputs / span_size(format) * header_bytes(format);
}

size_t panel_bytes(const WeightFormat& format, size_t size) {
  const bool is_row = format.bits < 16 && format.group_size == 0;
  const size_t factor_bytes = format.table == CodeTable::kE2m1 ? kRowHeaderBytes : 0;
  return group_bytes(format, padded_size(format, size)) +
         (is_row ? header_bytes(format) : factor_bytes);
}

size_t pieces_per_task(const ThreadPool& pool, size_t count) {
  const size_t wanted = kPackTasksPerThread * static_cast<size_t>(pool.num_threads());
  return std::clamp<size_t>(count / wanted, 1, kMaxTaskPieces);
}

Status check_storage(const WeightStorage& storage, size_t size_bytes, const char* where) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(storage.data) % kPackedAlignment == 0;
  if (storage.size_bytes == size_bytes && is_aligned) return {};
  return Error{Code::kShape, where,
               "storage of " + std::to_string(storage.size_bytes) +
                   (is_aligned ? " bytes" : " bytes, not 64-byte aligned") + ": give " +
                   std::to_string(size_bytes) + " aligned bytes",
               "storage"};
}

Status pack_panel(const PackedKernels& kernels, const WeightFormat& format,
                  const PanelSource& source, uint8_t* panel) {
  const MatrixView& matrix = *source.matrix;
  if (matrix.block_rows != nullptr) return lay_out_blocks(format, source, panel);
  if (matrix.scales != nullptr) return lay_out_panel(format, source, panel);
  if (format.scale_bits != 0 || format.table != CodeTable::kNone || format.has_zeros)
    return Error{Code::kUnsupported, "kernels.pack",
                 "superblocks, tables, codebooks, zero points and NVFP4 are laid out from a file's blocks and codes, "
                 "not coded from values: choose another format",
                 "format"};
  const int64_t refused = kernels.pack(
      {
          .format = format,
          .weights = matrix.data,
          .is_bf16 = matrix.is_bf16,
          .num_rows = matrix.rows,
          .row_size = matrix.columns,
          .first_row = source.first_row,
          .first_k = source.first_k,
          .last_k = source.last_k,
          .size = padded_size(format, source.last_k - source.first_k),
          .panel = panel});
  if (refused < 0) return {};
  const char* what = format.bits == 32   ? "a weight that is not finite"
                     : format.bits == 16 ? "a weight that is not finite in bf16"
                     : format.is_float ? "a weight that is not finite, itself or in its block"
                                       : "a weight that is not finite or beyond fp16 scales";
  return Error{Code::kUnsupported, "kernels.pack",
               "output " + std::to_string(refused) + " of a matrix holds " + what +
                   ": repair the checkpoint, or choose another format",
               "weights"};
}

Status pack_panels(ThreadPool& pool, size_t num_panels, FunctionRef<Status(size_t)> pack_one) {
  Mutex mutex;
  Status status;
  const Status ran = pool.parallel_for(num_panels, 1, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      Status packed = pack_one(i);
      if (packed.is_ok()) continue;
      const MutexLock lock(mutex);
      if (status.is_ok()) status = std::move(packed);
    }
  });
  return ran.is_ok() ? status : ran;
}

}  // namespace tandem
