// Operations of each element by itself, and rows moved about.
//
// Names end in the element types, input first. Sizes and strides count elements. Unless a kernel says
// otherwise, pointers are 16-byte aligned and widths and strides multiples of 8. Blocks may have any
// size; "items" is what the grid has to have threads for.

#include "overlap.cuh"
#include "types.cuh"

DEVICE u64 thread_id() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

struct Silu {
  static DEVICE float of(float x) { return x * sigmoid(x); }
};
// The tanh approximation: (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation near 0.
struct GeluTanh {
  static DEVICE float of(float x) {
    float linear = 1.5957691216f;
    return x * sigmoid(x * __fmaf_rn(x * x, linear * 0.044715f, linear));
  }
};

// out[r][i] = f(gate[r][i]) * up[r][i], where a row of `in` is `width` gates, then `width` ups.
//
// in [rows, 2 * width], out [rows, width], contiguous. Items: rows * width / 8.
template <class F, class T>
DEVICE void gated(const T* in, T* out, u32 rows, u32 width) {
  IN_TURN();
  u64 id = thread_id();
  u32 items = width / 8;
  u64 row = id / items;
  u32 at = (u32)(id % items) * 8;
  if (row >= rows) return;
  float gate[8], up[8];
  load8(in + row * 2 * width + at, gate);
  load8(in + row * 2 * width + width + at, up);
#pragma unroll
  for (int i = 0; i < 8; i++) up[i] = F::of(gate[i]) * up[i];
  store8(out + row * width + at, up);
}

#define GATED(F, function, T, name)                                                               \
  extern "C" __global__ void __launch_bounds__(256) function##_##name(const T* in, T* out,        \
                                                                      u32 rows, u32 width) {      \
    gated<F>(in, out, rows, width);                                                               \
  }
GATED(Silu, silu_mul, bf16, bf16)
GATED(Silu, silu_mul, float, f32)
GATED(GeluTanh, gelu_tanh_mul, bf16, bf16)
GATED(GeluTanh, gelu_tanh_mul, float, f32)

// out[t] = table[ids[t]] * scale; zeros for an id that is not below `vocabulary`. An id with its highest bit
// set is that of sample ids[t] - 2^31, which an earlier kernel has put into `sampled`.
//
// ids [tokens], sampled [samples], table [vocabulary, width], out [tokens, width], contiguous.
// Items: tokens * width / 8.
template <class T, class Out>
DEVICE void embed(const u32* ids, const u32* sampled, u32 samples, const T* table, Out* out,
                  u32 tokens, u32 vocabulary, u32 width, float scale) {
  IN_TURN();
  u64 id = thread_id();
  u32 items = width / 8;
  u64 token = id / items;
  u32 at = (u32)(id % items) * 8;
  if (token >= tokens) return;
  u32 row = ids[token], sample = row & 0x7fffffffu;
  if (row != sample && sample < samples) row = sampled[sample];
  float x[8] = {};
  if (row < vocabulary) load8(table + (u64)row * width + at, x);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= scale;
  store8(out + token * width + at, x);
}

#define EMBED(T, name, Out, out_name)                                                             \
  extern "C" __global__ void __launch_bounds__(256) embed_##name##_##out_name(                    \
      const u32* ids, const u32* sampled, u32 samples, const T* table, Out* out, u32 tokens,      \
      u32 vocabulary, u32 width, float scale) {                                                   \
    embed(ids, sampled, samples, table, out, tokens, vocabulary, width, scale);                   \
  }
EMBED(bf16, bf16, bf16, bf16)
EMBED(bf16, bf16, float, f32)
EMBED(float, f32, float, f32)
EMBED(float, f32, bf16, bf16)

// x[r] += bias. x [rows, width] contiguous, bias [width]. Items: rows * width / 8.
template <class T>
DEVICE void add_bias(T* x, const float* bias, u32 rows, u32 width) {
  IN_TURN();
  u64 id = thread_id();
  u32 items = width / 8;
  if (id / items >= rows) return;
  float a[8], b[8];
  load8(x + id * 8, a);
  load8(bias + id % items * 8, b);
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] += b[i];
  store8(x + id * 8, a);
}

#define ADD_BIAS(T, name)                                                                         \
  extern "C" __global__ void __launch_bounds__(256) add_bias_##name(T* x, const float* bias,      \
                                                                    u32 rows, u32 width) {        \
    add_bias(x, bias, rows, width);                                                               \
  }
ADD_BIAS(bf16, bf16)
ADD_BIAS(float, f32)

// The functions below take a flat array of any length whose last items may be a part. Items:
// ceil(count / 8).
template <class To, class From, class F>
DEVICE void map(To* to, const From* from, u64 count, F f) {
  IN_TURN();
  u64 at = thread_id() * 8;
  if (at + 8 <= count) {
    float x[8];
    load8(from + at, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = f(x[i]);
    store8(to + at, x);
  } else {
    for (; at < count; at++) to[at] = from_float<To>(f(to_float(from[at])));
  }
}

// x += y, each sum rounded once.
template <class T, class U>
DEVICE void add(T* x, const U* y, u64 count) {
  u64 at = thread_id() * 8;
  if (at + 8 <= count) {
    float a[8], b[8];
    load8(x + at, a);
    load8(y + at, b);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] += b[i];
    store8(x + at, a);
  } else {
    for (; at < count; at++) x[at] = from_float<T>(to_float(x[at]) + to_float(y[at]));
  }
}

#define FLAT(T, name)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) scale_##name(T* x, u64 count, float factor) { \
    map(x, x, count, [=](float v) { return v * factor; });                                        \
  }                                                                                               \
  /* x = cap * tanh(x / cap). */                                                                  \
  extern "C" __global__ void __launch_bounds__(256) soft_cap_##name(T* x, u64 count, float cap) { \
    map(x, x, count, [=](float v) { return cap * tanhf(v / cap); });                              \
  }
FLAT(bf16, bf16)
FLAT(float, f32)

extern "C" __global__ void __launch_bounds__(256) add_bf16_bf16(bf16* x, const bf16* y, u64 count) {
  add(x, y, count);
}
extern "C" __global__ void __launch_bounds__(256) add_f32_bf16(float* x, const bf16* y, u64 count) {
  add(x, y, count);
}
extern "C" __global__ void __launch_bounds__(256) add_f32_f32(float* x, const float* y, u64 count) {
  add(x, y, count);
}

#define CONVERT(From, from_name, To, to_name)                                                     \
  extern "C" __global__ void __launch_bounds__(256) convert_##from_name##_##to_name(              \
      const From* from, To* to, u64 count) {                                                      \
    map(to, from, count, [](float v) { return v; });                                              \
  }
CONVERT(float, f32, bf16, bf16)
CONVERT(bf16, bf16, float, f32)
CONVERT(float, f32, f16, f16)
CONVERT(f16, f16, float, f32)
CONVERT(f16, f16, bf16, bf16)

// out[r] = in[rows[r]], for rows of any type; rows that name NO_ROW are left alone.
//
// in and out are rows of row_bytes, a multiple of 16; rows [count]. Items: count * row_bytes / 16.
constexpr u32 NO_ROW = 0xffffffffu;
extern "C" __global__ void __launch_bounds__(256) gather_rows(const u8* in, u8* out,
                                                              const u32* rows, u32 count,
                                                              u64 row_bytes) {
  IN_TURN();
  u64 id = thread_id(), items = row_bytes / 16;
  u64 row = id / items, at = id % items * 16;
  if (row >= count || rows[row] == NO_ROW) return;
  *(uint4*)(out + row * row_bytes + at) = *(const uint4*)(in + rows[row] * row_bytes + at);
}

// The last token of each row of a step: out[r] = in[token_start[r] + span[r] - 1]. Rows without tokens,
// and those whose token is not below `limit`, are left alone.
//
// in [limit, row_bytes], the rest as for `gather_rows`.
extern "C" __global__ void __launch_bounds__(256) gather_last(const u8* in, u8* out,
                                                              const u32* token_start,
                                                              const u32* span, u32 limit, u32 count,
                                                              u64 row_bytes) {
  u64 id = thread_id(), items = row_bytes / 16;
  u64 row = id / items, at = id % items * 16;
  if (row >= count || span[row] == 0) return;
  u64 token = (u64)token_start[row] + span[row] - 1;
  if (token >= limit) return;
  *(uint4*)(out + row * row_bytes + at) = *(const uint4*)(in + token * row_bytes + at);
}
