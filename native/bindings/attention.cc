#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "bindings/status.h"
#include "kernels/decode_attention.h"
#include "kernels/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::bindings {
namespace {

using AnyRead = nb::ndarray<nb::ro, nb::device::cpu>;
using AnyWritten = nb::ndarray<nb::device::cpu>;
using Ids = nb::ndarray<nb::ro, const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<nb::ro, const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& what, const char* field) {
  raise({Code::kShape, "kernels.decode_attention", what, field});
}

template <class Array>
FloatType float_type(const Array& array, const char* name) {
  if (array.dtype() == nb::dtype<float>()) return FloatType::kFloat32;
  const auto bfloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (array.dtype().code == bfloat && array.dtype().bits == 16) return FloatType::kBfloat16;
  refuse(std::string(name) + " must be float32 or bfloat16", name);
}

template <class Array>
bool is_dense_after(const Array& array, size_t first_dim) {
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > first_dim; stride *= static_cast<int64_t>(array.shape(i)))
    if (array.shape(i) > 1 && array.stride(i) != stride) return false;
  return true;
}

// One step's plan: the arrays are held, and checked once for all layers.
class DecodeAttention {
 public:
  DecodeAttention(AnyRead kv, Ids block_table, Lengths context_lens, nb::object pool,
                  const std::string& isa)
      : kv_(kv), block_table_(block_table), context_lens_(context_lens), pool_(std::move(pool)) {
    if (kv.ndim() != 6 || kv.shape(2) != 2 || !is_dense_after(kv, 0))
      refuse("kv must be contiguous [blocks, layers, 2, kv_heads, block_size, head_dim]", "kv");
    if (block_table.shape(0) != context_lens.shape(0))
      refuse(std::to_string(block_table.shape(0)) + " block tables for " +
                 std::to_string(context_lens.shape(0)) + " lengths",
             "context_lens");
    step_.kv = kv.data();
    step_.kv_type = float_type(kv, "kv");
    step_.num_layers = kv.shape(1);
    step_.num_kv_heads = kv.shape(3);
    step_.block_size = kv.shape(4);
    step_.head_dim = kv.shape(5);
    step_.block_table = block_table.data();
    step_.table_width = block_table.shape(1);
    step_.context_lens = context_lens.data();
    step_.num_sequences = context_lens.shape(0);
    check_ids();
    kernel_ = choose_decode_attention(take(choose_isa(isa)));
    pool_pointer_ = pool_.is_none() ? nullptr : nb::cast<ThreadPool*>(pool_);
  }

  void run(size_t layer_idx, AnyRead q, AnyWritten out, float scale) {
    if (q.ndim() != 3 || q.shape(0) != step_.num_sequences || q.shape(2) != step_.head_dim ||
        q.shape(1) == 0 || q.shape(1) % step_.num_kv_heads != 0 || !is_dense_after(q, 1))
      refuse("q must be [sequences, heads, head_dim] with dense rows, heads a multiple of the KV "
             "heads",
             "q");
    if (q.shape(1) / step_.num_kv_heads > 64) refuse("more than 64 queries of a KV head", "q");
    if (out.ndim() != 3 || out.shape(0) != q.shape(0) || out.shape(1) != q.shape(1) ||
        out.shape(2) != q.shape(2) || !is_dense_after(out, 0) || out.dtype() != q.dtype())
      refuse("out must be contiguous, of the shape and type of q", "out");
    if (layer_idx >= step_.num_layers) refuse("no such layer", "layer_idx");
    DecodeQueries queries;
    queries.q = q.data();
    queries.out = out.data();
    queries.type = float_type(q, "q");
    queries.q_stride = static_cast<size_t>(q.stride(0));
    queries.num_heads = q.shape(1);
    queries.layer_idx = layer_idx;
    queries.scale = scale;
    Status status;
    {
      const nb::gil_scoped_release release;
      status = run_decode_attention(kernel_, pool_pointer_, step_, queries);
    }
    raise_if_error(status);
  }

 private:
  void check_ids() const {
    const auto num_blocks = static_cast<int64_t>(kv_.shape(0));
    const size_t capacity = step_.table_width * step_.block_size;
    for (size_t s = 0; s < step_.num_sequences; ++s) {
      const int64_t length = step_.context_lens[s];
      if (length < 1 || static_cast<size_t>(length) > capacity)
        refuse("context of " + std::to_string(length) + " tokens in a table for " +
                   std::to_string(capacity),
               "context_lens");
      const size_t num_used = (static_cast<size_t>(length) - 1) / step_.block_size + 1;
      for (size_t i = 0; i < num_used; ++i) {
        const int64_t id = step_.block_table[s * step_.table_width + i];
        if (id < 0 || id >= num_blocks)
          refuse("block " + std::to_string(id) + " of " + std::to_string(num_blocks),
                 "block_table");
      }
    }
  }

  AnyRead kv_;
  Ids block_table_;
  Lengths context_lens_;
  nb::object pool_;
  ThreadPool* pool_pointer_ = nullptr;
  DecodeStep step_;
  DecodeAttentionKernel kernel_ = nullptr;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<DecodeAttention>(module, "DecodeAttention",
                              "Attention of one step's sequences that compute one token each.")
      .def(nb::init<AnyRead, Ids, Lengths, nb::object, const std::string&>(), "kv"_a,
           "block_table"_a, "context_lens"_a, "pool"_a = nb::none(), "isa"_a = "",
           "Plan a step.\n\n"
           "Args:\n"
           "    kv: the pool, [blocks, layers, 2, kv_heads, block_size, head_dim]; float32 or\n"
           "        bfloat16, contiguous; held, and read by `run`.\n"
           "    block_table: int64 [sequences, width]; held.\n"
           "    context_lens: int64 [sequences]; tokens to attend to, at least 1; held.\n"
           "    pool: threads for steps large enough to share; None runs on the caller's.\n"
           "    isa: a variant by name; empty is the widest here.\n"
           "Raises: ShapeError (shape, dtype, a block or length out of bounds); ConfigError or\n"
           "    UnsupportedError (isa).")
      .def("run", &DecodeAttention::run, "layer_idx"_a, "q"_a, "out"_a, "scale"_a,
           "Attend one layer's queries `q` [sequences, heads, head_dim] into `out`.\n\n"
           "Bitwise the same for a sequence alone and in company, for any number of threads.\n"
           "Raises: ShapeError.");
}

}  // namespace tandem::bindings
