// The short causal convolution of layers with a state, and functions of their gates. Included inside the variant's
// anonymous namespace, after vec_float-inl.h and rows-inl.h.

// log(1 + exp(x)) to a few ulp of the result, without overflow.
inline F32 softplus(F32 x) {
  const F32 zero = zero_f32();
  const F32 y = exp_nonpositive(x < 0.0f ? x : zero - x);
  // log(1 + y) = 2 atanh(y / (2 + y)), whose argument is at most 1/3: its series, exact for small y as well.
  const F32 s = y / (set_f32(2.0f) + y);
  const F32 square = s * s;
  F32 p = set_f32(1.0f / 15);
  p = fma(p, square, set_f32(1.0f / 13));
  p = fma(p, square, set_f32(1.0f / 11));
  p = fma(p, square, set_f32(1.0f / 9));
  p = fma(p, square, set_f32(1.0f / 7));
  p = fma(p, square, set_f32(1.0f / 5));
  p = fma(p, square, set_f32(1.0f / 3));
  p = fma(p, square, set_f32(1.0f));
  return at_least(x, zero) + (s + s) * p;
}

inline F32 silu(F32 x) { return x * sigmoid(x); }

// The inputs of a short convolution over the rows of one sequence, preceded by the inputs that the
// sequence carries from earlier rows.
template <class T>
struct Convolution {
  const float* weight;  // [width][channels], the oldest input first.
  const float* bias;    // [channels], or null.
  size_t width, channels;
  const T* x;  // [rows][channels], rows `x_stride` apart.
  size_t x_stride;
  const T* carried;  // [width - 1][channels].
};

// Computes channels [first, first + size) of the convolution and SiLU for a tile's tokens; `out`
// rows are `out_stride` apart and filled up with zeros.
template <class T>
inline void convolve(const Convolution<T>& conv, size_t first_token, size_t num_tokens,
                     size_t first, size_t size, float* out, size_t out_stride) {
  const size_t width = conv.width, channels = conv.channels;
  const float* weight = conv.weight + first;
  const float* bias = conv.bias == nullptr ? nullptr : conv.bias + first;
  for (size_t t = 0; t < num_tokens; ++t) {
    const T* rows[kMaxConvWidth];
    for (size_t j = 0; j < width; ++j) {
      const size_t place = first_token + t + j;  // Among carried rows, then those of x.
      rows[j] = (place < width - 1 ? conv.carried + place * channels
                                   : conv.x + (place - (width - 1)) * conv.x_stride) + first;
    }
    float* row = out + t * out_stride;
    size_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      F32 sum = load_wide(rows[0] + i) * load_f32(weight + i);
      for (size_t j = 1; j < width; ++j)
        sum = fma(load_wide(rows[j] + i), load_f32(weight + j * channels + i), sum);
      if (bias != nullptr) sum = sum + load_f32(bias + i);
      store_f32(row + i, silu(sum));
    }
    if (i < size) {
      float inputs[kLanes], weights[kLanes];
      F32 sum = zero_f32();
      for (size_t j = 0; j < width; ++j) {
        load_tail(inputs, rows[j] + i, size - i, kLanes);
        load_tail(weights, weight + j * channels + i, size - i, kLanes);
        // The first product is rounded by itself, as in the loop over whole registers above.
        sum = j == 0 ? load_f32(inputs) * load_f32(weights)
                     : fma(load_f32(inputs), load_f32(weights), sum);
      }
      if (bias != nullptr) {
        load_tail(weights, bias + i, size - i, kLanes);
        sum = sum + load_f32(weights);
      }
      store_f32(inputs, silu(sum));
      for (; i < size; ++i) row[i] = inputs[i % kLanes];
    }
    for (; i < out_stride; ++i) row[i] = 0.0f;
  }
}
