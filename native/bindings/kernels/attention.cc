#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings/status.h"
#include "bindings/kernels/tensor_view.h"
#include "kernels/attention/attention.h"
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

// The block pool of a cache, in one of its layouts.
class KvPool {
 public:
  // [blocks, layers, 2, kv_heads, block_size, head_dim] of float32 or bfloat16.
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

  // [blocks, layers, bytes of a layer]: codes [2, kv_heads, block_size, head_dim], then fp16 scales
  // [2, kv_heads, block_size].
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

  // [blocks, layers, block_size, key_dim] of float32 or bfloat16; the values are the first
  // `value_dim` items of the keys, and all heads share them.
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

  // [blocks, layers, bytes of a layer]: codes [block_size, key_dim], then fp16 scales [block_size].
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

  const KvView& view() const { return view_; }

  void read(size_t layer_idx, ThreadPool* pool) const {
    if (layer_idx >= view_.num_layers) refuse("no such layer", "layer_idx");
    uint64_t sum = 0;
    run_released([&] { return read_kv(pool, view_, layer_idx, sum); });
  }

 private:
  KvPool(const TensorView& tensor, const KvView& view) : tensor_(tensor), view_(view) {}

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
    if (format != "int8" && format != "fp8")
      raise({Code::kConfig, "kernels.attention", "unknown KV format " + format + ": int8 or fp8",
             "format"});
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
};

// One step's plan: the arrays are held, and checked once for all layers.
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
              int64_t window, float soft_cap, const TensorView* sinks, int64_t chunk) const {
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
    if (layer_idx >= kv.num_layers) refuse("no such layer", "layer_idx");
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
    call.layer_idx = layer_idx;
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
    if (layer_idx >= kv.num_layers) refuse("no such layer", "layer_idx");
    KvRows source;
    source.keys = static_cast<const uint8_t*>(rows.data()) +
                  first_head * kv.key_dim * float_bytes(rows.float_type());
    source.stride = rows.stride(0);
    source.type = rows.float_type();
    source.layer_idx = layer_idx;
    run_released([&] { return store_kv(pool_pointer_, step_, source); });
  }

 private:
  size_t num_tokens() const { return static_cast<size_t>(step_.query_start.back()); }

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
           "A token's result is bitwise the same alone and in company, prefilled whole or in\n"
           "chunks or decoded, for any number of threads. Raises: ShapeError.")
      .def("store", &PlannedAttention::store, "layer_idx"_a, "rows"_a, "first_head"_a = 0,
           "Write the step's keys and values to their slots, in the type of the pool.\n\n"
           "`rows` [tokens, heads, key_dim] holds keys of all KV heads from `first_head` on, then\n"
           "values (a latent pool has keys only). Raises: ShapeError.");
}

}  // namespace tandem::bindings
