#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/attention/attention.h"
#include "kernels/sparse/index.h"
#include "kernels/vectors/isa.h"
#include "kernels/attention/kv_store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using Ids = nb::ndarray<nb::ro, const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& what, const char* field) {
  raise({Code::kShape, "kernels.attention", what, field});
}

// The pool of KV blocks of a cache, in one of the layouts that attention can read.
class KvPool {
 public:
  // Views a pool [blocks, layers, 2, kv_heads, block_size, head_dim] of float32 or bfloat16.
  static KvPool* make_grouped(const TensorView& tensor) {
    if (tensor.num_dims() != 6 || tensor.shape(2) != 2 || !tensor.is_dense_from(0) ||
        !tensor.is_float())
      refuse_view("kernels.attention", "tensor", tensor,
                  "give contiguous [blocks, layers, 2, kv_heads, block_size, head_dim] of float32 "
                  "or bfloat16");
    KvView view = start(tensor);
    view.num_kv_heads = tensor.shape(3);
    view.block_size = tensor.shape(4);
    view.key_dim = view.value_dim = tensor.shape(5);
    view.row_bytes = view.key_dim * float_bytes(tensor.float_type());
    view.head_bytes = view.row_bytes * view.block_size;
    view.value_offset = view.head_bytes * view.num_kv_heads;
    view.layer_bytes = 2 * view.value_offset;
    return finish(tensor, view);
  }

  // Views a quantized pool [blocks, layers, bytes of a layer]: codes [2, kv_heads, block_size,
  // head_dim], then fp16 scales [2, kv_heads, block_size].
  static KvPool* make_coded(const TensorView& tensor, const std::string& format, size_t num_kv_heads,
                            size_t block_size, size_t head_dim) {
    const size_t num_rows = 2 * num_kv_heads * block_size;
    KvView view = start_coded(tensor, format, num_rows * (head_dim + 2));
    view.num_kv_heads = num_kv_heads;
    view.block_size = block_size;
    view.key_dim = view.value_dim = view.row_bytes = head_dim;
    view.head_bytes = head_dim * block_size;
    view.value_offset = view.head_bytes * num_kv_heads;
    view.layer_bytes = tensor.shape(2);
    view.key_scale_offset = num_rows * head_dim;
    view.value_scale_offset = view.key_scale_offset + num_kv_heads * block_size * 2;
    return finish(tensor, view);
  }

  // Views a pool of latents [blocks, layers, block_size, key_dim] of float32 or bfloat16; the
  // values are the first `value_dim` items of the keys, and all heads share them.
  static KvPool* make_latent(const TensorView& tensor, size_t value_dim) {
    if (tensor.num_dims() != 4 || !tensor.is_dense_from(0) || !tensor.is_float() ||
        value_dim < 1 || value_dim > tensor.shape(3))
      refuse_view("kernels.attention", "tensor", tensor,
                  "give contiguous [blocks, layers, block_size, key_dim] of float32 or bfloat16, "
                  "key_dim at least " + std::to_string(value_dim));
    KvView view = start(tensor);
    view.num_kv_heads = 1;
    view.block_size = tensor.shape(2);
    view.key_dim = tensor.shape(3);
    view.value_dim = value_dim;
    view.row_bytes = view.key_dim * float_bytes(tensor.float_type());
    view.head_bytes = view.layer_bytes = view.row_bytes * view.block_size;
    return finish(tensor, view);
  }

  // Views a quantized pool of latents [blocks, layers, bytes of a layer]: codes [block_size,
  // key_dim], then fp16 scales [block_size].
  static KvPool* make_coded_latent(const TensorView& tensor, const std::string& format,
                                   size_t block_size, size_t key_dim, size_t value_dim) {
    if (value_dim < 1 || value_dim > key_dim)
      refuse(std::to_string(value_dim) + " of " + std::to_string(key_dim) + " items", "value_dim");
    KvView view = start_coded(tensor, format, block_size * (key_dim + 2));
    view.num_kv_heads = 1;
    view.block_size = block_size;
    view.key_dim = view.row_bytes = key_dim;
    view.value_dim = value_dim;
    view.head_bytes = key_dim * block_size;
    view.layer_bytes = tensor.shape(2);
    view.key_scale_offset = view.value_scale_offset = view.head_bytes;
    return finish(tensor, view);
  }

  // [blocks, items] of float32 or bfloat16, or uint8 [blocks, bytes] of codes: rows of `key_dim`
  // items for each token of a block, then fp16 scales of codes, at each of `layer_offsets`, in bytes.
  static KvPool* make_placed(const TensorView& tensor, const std::string& format, size_t block_size,
                             size_t key_dim, size_t value_dim,
                             const std::vector<size_t>& layer_offsets) {
    const bool is_coded = !format.empty();
    if (tensor.num_dims() != 2 || !tensor.is_dense_from(0) ||
        !(is_coded ? tensor.array().dtype() == nb::dtype<uint8_t>() : tensor.is_float()))
      refuse_view("kernels.attention", "tensor", tensor,
                  is_coded ? "give contiguous uint8 [blocks, bytes]"
                           : "give contiguous [blocks, items] of float32 or bfloat16");
    if (is_coded) check_format(format);
    if (value_dim < 1 || value_dim > key_dim || block_size < 1 || layer_offsets.empty())
      refuse(std::to_string(value_dim) + " of " + std::to_string(key_dim) + " items in blocks of " +
                 std::to_string(block_size) + " in " + std::to_string(layer_offsets.size()) +
                 " layers",
             "value_dim");
    KvView view;
    view.base = static_cast<const uint8_t*>(tensor.data());
    const size_t item = is_coded ? 1 : float_bytes(tensor.float_type());
    view.type = format == "int8"  ? KvType::kInt8
                : is_coded        ? KvType::kFp8
                : item == 4       ? KvType::kFloat32
                                  : KvType::kBfloat16;
    view.num_blocks = tensor.shape(0);
    view.num_layers = layer_offsets.size();
    view.num_kv_heads = 1;
    view.block_size = block_size;
    view.key_dim = key_dim;
    view.value_dim = value_dim;
    view.row_bytes = key_dim * item;
    view.head_bytes = view.row_bytes * block_size;
    view.key_scale_offset = view.value_scale_offset = view.head_bytes;
    view.layer_bytes = view.head_bytes + (is_coded ? block_size * 2 : 0);
    view.block_bytes = tensor.shape(1) * item;
    for (const size_t offset : layer_offsets)
      if (offset % item != 0 || offset + view.layer_bytes > view.block_bytes)
        refuse("a layer at byte " + std::to_string(offset) + " of blocks of " +
                   std::to_string(view.block_bytes) + " bytes",
               "layer_offsets");
    auto* pool = new KvPool(tensor, view);
    pool->layer_offsets_ = layer_offsets;
    return pool;
  }

  const KvView& view() const { return view_; }

  // Returns the byte offset of a layer in a block. Raises a ShapeError if there is no such layer.
  size_t layer_offset(size_t layer_idx) const {
    if (layer_idx >= view_.num_layers) refuse("no such layer", "layer_idx");
    return layer_offsets_.empty() ? layer_idx * view_.layer_bytes : layer_offsets_[layer_idx];
  }

  void read(size_t layer_idx, ThreadPool* pool) const {
    const size_t offset = layer_offset(layer_idx);
    uint64_t sum = 0;
    run_released([&] { return read_kv(pool, view_, offset, sum); });
  }

 private:
  KvPool(const TensorView& tensor, const KvView& view) : tensor_(tensor), view_(view) {}

  static void check_format(const std::string& format) {
    if (format != "int8" && format != "fp8")
      raise({Code::kConfig, "kernels.attention", "unknown KV format " + format + ": int8 or fp8",
             "format"});
  }

  static KvView start(const TensorView& tensor) {
    KvView view;
    view.base = static_cast<const uint8_t*>(tensor.data());
    view.type = tensor.is_float32() ? KvType::kFloat32 : KvType::kBfloat16;
    view.num_blocks = tensor.shape(0);
    view.num_layers = tensor.shape(1);
    return view;
  }
  static KvView start_coded(const TensorView& tensor, const std::string& format,
                            size_t layer_bytes) {
    check_format(format);
    if (tensor.num_dims() != 3 || !tensor.is_dense_from(0) ||
        tensor.array().dtype() != nb::dtype<uint8_t>() || tensor.shape(2) != layer_bytes)
      refuse_view("kernels.attention", "tensor", tensor,
                  "give contiguous uint8 [blocks, layers, " + std::to_string(layer_bytes) + "]");
    KvView view = start(tensor);
    view.type = format == "int8" ? KvType::kInt8 : KvType::kFp8;
    return view;
  }
  static KvPool* finish(const TensorView& tensor, KvView view) {
    if (view.num_layers == 0 || view.num_kv_heads == 0 || view.block_size == 0 || view.key_dim == 0)
      refuse_view("kernels.attention", "tensor", tensor, "no dimension but the first may be empty");
    view.block_bytes = view.layer_bytes * view.num_layers;
    return new KvPool(tensor, view);
  }

  TensorView tensor_;
  KvView view_;
  std::vector<size_t> layer_offsets_;  // Empty where layers follow each other.
};

// The plan of attention for one step. It keeps its arrays, which are checked once for all layers.
class PlannedAttention {
 public:
  PlannedAttention(nb::object kv, Ids block_table, std::vector<int64_t> query_start,
                   std::vector<int64_t> context_lens, nb::object pool, const std::string& isa)
      : kv_(std::move(kv)), block_table_(block_table), pool_(std::move(pool)) {
    step_.kv = nb::cast<const KvPool&>(kv_).view();
    step_.block_table = block_table.data();
    step_.table_width = block_table.shape(1);
    step_.query_start = std::move(query_start);
    step_.context_lens = std::move(context_lens);
    check();
    kernels_ = &choose_attention(isa.empty() ? available_isas().back() : take(choose_isa(isa)));
    pool_pointer_ = pool_.is_none() ? nullptr : nb::cast<ThreadPool*>(pool_);
  }

  void attend(size_t layer_idx, const TensorView& q, const TensorView& out, float scale,
              int64_t window, float soft_cap, const TensorView* sinks, int64_t chunk,
              const TensorView* chosen) const {
    constexpr const char* kWhere = "kernels.attention";
    const KvView& kv = step_.kv;
    if (out.num_dims() != 3 || out.shape(0) != num_tokens() || out.shape(1) == 0 ||
        out.shape(1) % kv.num_kv_heads != 0 || out.shape(2) != kv.value_dim ||
        !out.is_dense_from(1) || !out.is_float())
      refuse_view(kWhere, "out", out,
                  "give [" + std::to_string(num_tokens()) + ", a multiple of " +
                      std::to_string(kv.num_kv_heads) + " heads, " + std::to_string(kv.value_dim) +
                      "] of float32 or bfloat16 with dense rows");
    if (q.num_dims() != 3 || q.shape(0) != num_tokens() || q.shape(1) < out.shape(1) ||
        q.shape(2) != kv.key_dim || !q.is_dense_from(1))
      refuse_view(kWhere, "q", q,
                  "give [" + std::to_string(num_tokens()) + ", at least " +
                      std::to_string(out.shape(1)) + " heads, " + std::to_string(kv.key_dim) +
                      "] with dense rows");
    check_same_type(kWhere, "q", q, out);
    if (chosen != nullptr) {
      check_choice(*chosen);
      if (window != 0 || chunk != 0) refuse("a window or chunks of chosen keys", "chosen");
    }
    if (window < 0) refuse("a window of " + std::to_string(window) + " tokens", "window");
    if (chunk < 0) refuse("chunks of " + std::to_string(chunk) + " tokens", "chunk");
    if (!(soft_cap >= 0.0f)) refuse("a negative cap", "soft_cap");
    if (sinks != nullptr && (sinks->num_dims() != 1 || sinks->shape(0) != out.shape(1) ||
                             !sinks->is_dense_from(0) || !sinks->is_float32()))
      refuse_view(kWhere, "sinks", *sinks, "give float32 [heads]");
    AttentionCall call;
    call.q = q.data();
    call.q_stride = q.stride(0);
    call.out = out.data();
    call.out_stride = out.stride(0);
    call.type = q.float_type();
    call.num_heads = out.shape(1);
    call.layer_offset = pool_of().layer_offset(layer_idx);
    if (chosen != nullptr) {
      call.chosen = static_cast<const int32_t*>(chosen->data());
      call.num_chosen = chosen->shape(1);
      check_chosen(call.chosen, call.num_chosen);
    }
    call.rule = {scale, soft_cap, window,
                 sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data()), chunk};
    run_released([&] { return run_attention(*kernels_, pool_pointer_, step_, call); });
  }

  void store(size_t layer_idx, const TensorView& rows, size_t first_head) const {
    const KvView& kv = step_.kv;
    const size_t num_heads = (kv.value_offset == 0 ? 1 : 2) * kv.num_kv_heads;
    if (rows.num_dims() != 3 || rows.shape(0) != num_tokens() ||
        rows.shape(1) < first_head + num_heads || rows.shape(2) != kv.key_dim ||
        !rows.is_dense_from(1) || !rows.is_float())
      refuse_view("kernels.store_kv", "rows", rows,
                  "give [" + std::to_string(num_tokens()) + ", " + std::to_string(num_heads) +
                      " heads from " + std::to_string(first_head) + " on, " +
                      std::to_string(kv.key_dim) + "] of float32 or bfloat16 with dense rows");
    KvRows source;
    source.keys = static_cast<const uint8_t*>(rows.data()) +
                  first_head * kv.key_dim * float_bytes(rows.float_type());
    source.stride = rows.stride(0);
    source.type = rows.float_type();
    source.layer_offset = pool_of().layer_offset(layer_idx);
    run_released([&] { return store_kv(pool_pointer_, step_, source); });
  }

  void choose(size_t layer_idx, const TensorView& q, const TensorView& weights, float scale,
              const TensorView& chosen) const {
    constexpr const char* kWhere = "kernels.choose_keys";
    const KvView& kv = step_.kv;
    if (kv.num_kv_heads != 1) refuse("keys of several heads", "kv");
    if (q.num_dims() != 3 || q.shape(0) != num_tokens() || q.shape(1) < 1 ||
        q.shape(1) > kTileRows || q.shape(2) != kv.key_dim || !q.is_dense_from(1) || !q.is_float())
      refuse_view(kWhere, "q", q,
                  "give [" + std::to_string(num_tokens()) + ", 1 to " + std::to_string(kTileRows) +
                      " heads, " + std::to_string(kv.key_dim) +
                      "] of float32 or bfloat16 with dense rows");
    if (weights.num_dims() != 2 || weights.shape(0) != num_tokens() ||
        weights.shape(1) != q.shape(1) || !weights.is_dense_from(1) || !weights.is_float32())
      refuse_view(kWhere, "weights", weights,
                  "give float32 [" + std::to_string(num_tokens()) + ", " +
                      std::to_string(q.shape(1)) + "] with dense rows");
    check_choice(chosen);
    IndexCall call;
    call.q = q.data();
    call.q_stride = q.stride(0);
    call.type = q.float_type();
    call.num_heads = q.shape(1);
    call.weights = static_cast<const float*>(weights.data());
    call.weight_stride = weights.stride(0);
    call.scale = scale;
    call.layer_offset = pool_of().layer_offset(layer_idx);
    call.chosen = static_cast<int32_t*>(chosen.data());
    call.num_chosen = chosen.shape(1);
    run_released([&] { return run_index(*kernels_, pool_pointer_, step_, call); });
  }

 private:
  size_t num_tokens() const { return static_cast<size_t>(step_.query_start.back()); }
  const KvPool& pool_of() const { return nb::cast<const KvPool&>(kv_); }

  void check_choice(const TensorView& chosen) const {
    if (chosen.num_dims() != 2 || chosen.shape(0) != num_tokens() || chosen.shape(1) < 1 ||
        !chosen.is_dense_from(0) || !chosen.is_int32())
      refuse_view("kernels.attention", "chosen", chosen,
                  "give contiguous int32 [" + std::to_string(num_tokens()) + ", at least 1]");
  }

  // Checks that chosen positions ascend and end at the token's own at most, so that no key beyond
  // its context is read.
  void check_chosen(const int32_t* chosen, size_t count) const {
    for (size_t s = 0; s < step_.num_sequences(); ++s)
      for (int64_t row = step_.query_start[s]; row < step_.query_start[s + 1]; ++row) {
        const int64_t position = step_.context_lens[s] - step_.query_start[s + 1] + row;
        if (position < static_cast<int64_t>(count)) continue;
        const int32_t* own = chosen + static_cast<size_t>(row) * count;
        int64_t before = -1;
        bool is_right = true;
        for (size_t i = 0; i < count; ++i) {
          is_right &= own[i] > before;
          before = own[i];
        }
        if (!is_right || before > position)
          refuse("positions of row " + std::to_string(row) + ": let them ascend to " +
                     std::to_string(position) + " at most",
                 "chosen");
      }
  }

  void check() const {
    const auto num_blocks = static_cast<int64_t>(step_.kv.num_blocks);
    const size_t num_sequences = step_.num_sequences();
    if (block_table_.shape(0) != num_sequences || step_.query_start.size() != num_sequences + 1 ||
        step_.query_start[0] != 0)
      refuse(std::to_string(block_table_.shape(0)) + " block tables and " +
                 std::to_string(step_.query_start.size()) + " query starts for " +
                 std::to_string(num_sequences) + " lengths: give as many tables, and one more start, "
                 "the first 0",
             "context_lens");
    const size_t capacity = step_.table_width * step_.kv.block_size;
    for (size_t s = 0; s < num_sequences; ++s) {
      const int64_t length = step_.context_lens[s];
      const int64_t num_queries = step_.query_start[s + 1] - step_.query_start[s];
      if (num_queries < 1 || length < num_queries || static_cast<size_t>(length) > capacity)
        refuse(std::to_string(num_queries) + " queries in a context of " + std::to_string(length) +
                   " tokens in a table for " + std::to_string(capacity),
               "context_lens");
      const size_t num_used = (static_cast<size_t>(length) - 1) / step_.kv.block_size + 1;
      for (size_t i = 0; i < num_used; ++i) {
        const int64_t id = step_.block_table[s * step_.table_width + i];
        if (id < 0 || id >= num_blocks)
          refuse("block " + std::to_string(id) + " of " + std::to_string(num_blocks),
                 "block_table");
      }
    }
  }

  nb::object kv_;
  Ids block_table_;
  nb::object pool_;
  ThreadPool* pool_pointer_ = nullptr;
  AttentionStep step_;
  const AttentionKernels* kernels_ = nullptr;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<KvPool>(module, "KvPool", "Blocks of keys and values that attention reads in place.")
      .def_static("grouped", &KvPool::make_grouped, "tensor"_a,
                  nb::rv_policy::take_ownership,
                  "Of [blocks, layers, 2, kv_heads, block_size, head_dim], float32 or bfloat16.\n\n"
                  "Raises: ShapeError.")
      .def_static("coded", &KvPool::make_coded, "tensor"_a, "format"_a, "num_kv_heads"_a,
                  "block_size"_a, "head_dim"_a, nb::rv_policy::take_ownership,
                  "Of uint8 [blocks, layers, bytes]: in each layer codes [2, kv_heads, block_size,\n"
                  "head_dim], int8 or fp8 (e4m3), then fp16 scales [2, kv_heads, block_size].\n\n"
                  "Raises: ShapeError; ConfigError (format).")
      .def_static("coded_latent", &KvPool::make_coded_latent, "tensor"_a, "format"_a,
                  "block_size"_a, "key_dim"_a, "value_dim"_a, nb::rv_policy::take_ownership,
                  "Of uint8 [blocks, layers, bytes]: in each layer codes [block_size, key_dim], int8\n"
                  "or fp8 (e4m3), then fp16 scales [block_size]; values as in `latent`.\n\n"
                  "Raises: ShapeError; ConfigError (format).")
      .def_static("latent", &KvPool::make_latent, "tensor"_a, "value_dim"_a,
                  nb::rv_policy::take_ownership,
                  "Of [blocks, layers, block_size, key_dim], float32 or bfloat16 (MLA): all heads\n"
                  "share a key, whose first `value_dim` items are the value. Raises: ShapeError.")
      .def_static("placed", &KvPool::make_placed, "tensor"_a, "format"_a, "block_size"_a,
                  "key_dim"_a, "value_dim"_a, "layer_offsets"_a, nb::rv_policy::take_ownership,
                  "Of [blocks, items], float32 or bfloat16, or uint8 [blocks, bytes] of codes.\n\n"
                  "At each of `layer_offsets`, in bytes, a block has rows [block_size, key_dim] of\n"
                  "one layer and, of codes, fp16 scales [block_size]; values as in `latent`.\n\n"
                  "Args:\n"
                  "    tensor: the blocks; held.\n"
                  "    format: int8 or fp8 (e4m3); empty: the items are no codes.\n"
                  "    block_size: tokens of a block.\n"
                  "    key_dim: items of a token.\n"
                  "    value_dim: how many of them, from the first, are the value.\n"
                  "    layer_offsets: one for each layer.\n"
                  "Raises: ShapeError; ConfigError (format).")
      .def("read", &KvPool::read, "layer_idx"_a, "pool"_a.none() = nb::none(),
           "Read a layer of all blocks and do nothing: a ceiling for benchmarks.\n\n"
           "Raises: ShapeError.");
  nb::class_<PlannedAttention>(module, "PlannedAttention",
                               "Attention of one step's tokens, planned once for all layers.")
      .def(nb::init<nb::object, Ids, std::vector<int64_t>, std::vector<int64_t>, nb::object,
                    const std::string&>(),
           "kv"_a, "block_table"_a, "query_start"_a, "context_lens"_a, "pool"_a = nb::none(),
           "isa"_a = "",
           nb::sig("def __init__(self, kv: KvPool, block_table: object, query_start: "
                   "collections.abc.Sequence[int], context_lens: collections.abc.Sequence[int], "
                   "pool: ThreadPool | None = None, isa: str = '') -> None"),
           "Plan a step.\n\n"
           "Args:\n"
           "    kv: the blocks; held.\n"
           "    block_table: int64 [sequences, width]; held.\n"
           "    query_start: sequences + 1 row numbers: whose tokens are which; at least one each.\n"
           "    context_lens: tokens of each sequence, this step's included.\n"
           "    pool: threads for steps large enough to share; None runs on the caller's.\n"
           "    isa: a variant by name; empty is the widest here.\n"
           "Raises: ShapeError (shape, type, a block or length out of bounds); ConfigError or\n"
           "    UnsupportedError (isa).")
      .def("attend", &PlannedAttention::attend, "layer_idx"_a, "q"_a, "out"_a, "scale"_a,
           "window"_a = 0, "soft_cap"_a = 0.0f, "sinks"_a.none() = nb::none(), "chunk"_a = 0,
           "chosen"_a.none() = nb::none(),
           "Attend each token to its sequence's context up to itself.\n\n"
           "Args:\n"
           "    layer_idx: whose keys and values; this step's were stored before.\n"
           "    q: [tokens, heads, key_dim]; heads beyond those of `out` are not read.\n"
           "    out: [tokens, heads, value_dim], written.\n"
           "    scale: on the products.\n"
           "    window: a token sees itself and window - 1 before it; 0 is all.\n"
           "    soft_cap: a score becomes cap * tanh(score / cap); 0 is none.\n"
           "    sinks: float32 [heads], a logit that takes weight and adds nothing.\n"
           "    chunk: no key before the last multiple of it up to the token is seen; 0 is all.\n"
           "    chosen: int32 [tokens, n], positions, ascending, of the keys that a token sees;\n"
           "        None is all. A token before position n sees all in any case.\n"
           "A token's result is bitwise the same alone and in company, prefilled whole or in\n"
           "chunks or decoded, for any number of threads. Raises: ShapeError.")
      .def("store", &PlannedAttention::store, "layer_idx"_a, "rows"_a, "first_head"_a = 0,
           "Write the step's keys and values to their slots, in the type of the pool.\n\n"
           "`rows` [tokens, heads, key_dim] holds keys of all KV heads from `first_head` on, then\n"
           "values (a latent pool has keys only). Raises: ShapeError.")
      .def("choose", &PlannedAttention::choose, "layer_idx"_a, "q"_a, "weights"_a, "scale"_a,
           "chosen"_a,
           "Choose the keys of an index that score best with each token, up to its own.\n\n"
           "A score is the sum over heads, in float32, of scale * weight * max(q . key, 0); of\n"
           "equal ones the lowest position is chosen.\n\n"
           "Args:\n"
           "    layer_idx: whose index keys; this step's were stored before.\n"
           "    q: [tokens, heads, key_dim].\n"
           "    weights: float32 [tokens, heads].\n"
           "    scale: on the weights.\n"
           "    chosen: int32 [tokens, n], written: positions, ascending. A token that sees no\n"
           "        more than n keys gets all their positions, and then zeros.\n"
           "As invariant as `attend`. Raises: ShapeError.");
}

}  // namespace tandem::bindings
