// Root-mean-square normalization: `x / sqrt(mean(x^2) + eps) * weight`, each row by itself. A row is
// summed in an order that depends on its width alone, so its result does not depend on how many rows
// there are.
//
// Names end in the types: `rms_norm_<in>_<out>`, `add_rms_norm_<residual>_<in and out>`,
// `head_norm_<in and out>`. Weights are float32. Sizes and strides count elements. Pointers are
// 16-byte aligned, widths and strides are multiples of 8, and a width is at most 2 * 8 * blockDim.x.

#include "overlap.cuh"
#include "types.cuh"

// A row's share of one thread: chunks of 8, `blockDim.x` chunks apart.
template <int CHUNKS, class T>
DEVICE void load_row(const T* row, u32 width, float (&x)[CHUNKS][8]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 at = (threadIdx.x + c * blockDim.x) * 8;
    if (at < width) {
      load8(row + at, x[c]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) x[c][i] = 0.0f;
    }
  }
}

template <int CHUNKS>
DEVICE float factor_of(const float (&x)[CHUNKS][8], u32 width, float eps, float* room) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum = __fmaf_rn(x[c][i], x[c][i], sum);
  }
  return 1.0f / sqrtf(sum_block(sum, room) / (float)width + eps);
}

// Calls `call(chunks)` with the chunks of 8 that a thread has of a row. No more than two, so that registers
// leave room for as many threads as a multiprocessor has.
#define FOR_WIDTH(width, call)         \
  do {                                 \
    if ((width) <= 8 * blockDim.x) {   \
      call(1);                         \
    } else {                           \
      call(2);                         \
    }                                  \
  } while (0)

template <int CHUNKS, class In, class Out>
DEVICE void norm_row(const In* x, const float* weight, Out* out, u32 width, float eps, float* room) {
  float row[CHUNKS][8];
  load_row<CHUNKS>(x, width, row);
  float factor = factor_of<CHUNKS>(row, width, eps, room);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 at = (threadIdx.x + c * blockDim.x) * 8;
    if (at < width) {
      float w[8];
      load8(weight + at, w);
#pragma unroll
      for (int i = 0; i < 8; i++) w[i] = row[c][i] * factor * w[i];
      store8(out + at, w);
    }
  }
}

// out[r] = norm(x[r]) * weight.
//
// x [rows, width] with x_stride from row to row, weight [width], out [rows, width] with out_stride;
// x and out may be the same. Grid: rows. Block: whole warps, at most 1024 threads.
template <class In, class Out>
DEVICE void rms_norm(const In* x, i64 x_stride, const float* weight, Out* out, i64 out_stride,
                     u32 width, float eps) {
  __shared__ float room[32];
  IN_TURN();
  x += blockIdx.x * x_stride;
  out += blockIdx.x * out_stride;
#define CALL(chunks) norm_row<chunks>(x, weight, out, width, eps, room)
  FOR_WIDTH(width, CALL);
#undef CALL
}

#define RMS_NORM(In, in, Out, out_name)                                                           \
  extern "C" __global__ void __launch_bounds__(1024) rms_norm_##in##_##out_name(                   \
      const In* x, i64 x_stride, const float* weight, Out* out, i64 out_stride, u32 width,        \
      float eps) {                                                                                \
    rms_norm(x, x_stride, weight, out, out_stride, width, eps);                                   \
  }
RMS_NORM(bf16, bf16, bf16, bf16)
RMS_NORM(float, f32, bf16, bf16)
RMS_NORM(float, f32, float, f32)

template <int CHUNKS, class Residual, class T>
DEVICE void add_norm_row(Residual* residual, const T* x, const float* post, const float* weight,
                         T* out, u32 width, float eps, float* room) {
  float row[CHUNKS][8], sum[CHUNKS][8];
  load_row<CHUNKS>(x, width, row);
  load_row<CHUNKS>(residual, width, sum);
  float factor = post ? factor_of<CHUNKS>(row, width, eps, room) : 1.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 at = (threadIdx.x + c * blockDim.x) * 8;
    if (at < width) {
      if (post) {
        float w[8];
        load8(post + at, w);
#pragma unroll
        for (int i = 0; i < 8; i++) row[c][i] = row[c][i] * factor * w[i];
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        // What is normalized is what is kept: the sum as the residual stream stores it.
        sum[c][i] = to_float(from_float<Residual>(sum[c][i] + row[c][i]));
      }
      store8(residual + at, sum[c]);
    }
  }
  if (!weight) return;
  factor = factor_of<CHUNKS>(sum, width, eps, room);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    u32 at = (threadIdx.x + c * blockDim.x) * 8;
    if (at < width) {
      float w[8];
      load8(weight + at, w);
#pragma unroll
      for (int i = 0; i < 8; i++) w[i] = sum[c][i] * factor * w[i];
      store8(out + at, w);
    }
  }
}

// residual[r] += x[r], or norm(x[r]) * post where `post` is given; out[r] = norm(residual[r]) * weight,
// unless `weight` is null.
//
// residual, x, out [rows, width], contiguous; post, weight [width]. x and out may be the same.
// Grid: rows. Block: whole warps, at most 1024 threads.
template <class Residual, class T>
DEVICE void add_rms_norm(Residual* residual, const T* x, const float* post, const float* weight,
                         T* out, u32 width, float eps) {
  __shared__ float room[32];
  IN_TURN();
  i64 first = (i64)blockIdx.x * width;
#define CALL(chunks)                                                                              \
  add_norm_row<chunks>(residual + first, x + first, post, weight, out + first, width, eps, room)
  FOR_WIDTH(width, CALL);
#undef CALL
}

#define ADD_RMS_NORM(Residual, residual_name, T, name)                                            \
  extern "C" __global__ void __launch_bounds__(1024) add_rms_norm_##residual_name##_##name(        \
      Residual* residual, const T* x, const float* post, const float* weight, T* out, u32 width,  \
      float eps) {                                                                                \
    add_rms_norm(residual, x, post, weight, out, width, eps);                                     \
  }
ADD_RMS_NORM(bf16, bf16, bf16, bf16)
ADD_RMS_NORM(float, f32, bf16, bf16)
ADD_RMS_NORM(float, f32, float, f32)

// x[t][h] = norm(x[t][h]) * weight, in place, for the heads of queries or keys.
//
// x [tokens, heads, dim] with token_stride and head_stride, weight [dim]; dim at most 8 * lanes.
// `lanes` neighbouring threads have a head: the power of two from dim / 8 on, at most 32.
// Grid: ceil(tokens * heads * lanes / blockDim.x). Block: whole warps.
template <class T>
DEVICE void head_norm(T* x, i64 token_stride, i64 head_stride, const float* weight, u32 tokens,
                      u32 heads, u32 dim, u32 lanes, float eps) {
  IN_TURN();
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u64 head = thread / lanes;
  u32 at = (u32)(thread % lanes) * 8;
  bool has_some = head < (u64)tokens * heads && at < dim;
  T* place = x + (i64)(head / heads) * token_stride + (i64)(head % heads) * head_stride + at;
  float own[8] = {};
  if (has_some) load8(place, own);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = __fmaf_rn(own[i], own[i], sum);
  float factor = 1.0f / sqrtf(sum_lanes(sum, lanes) / (float)dim + eps);
  if (!has_some) return;
  float w[8];
  load8(weight + at, w);
#pragma unroll
  for (int i = 0; i < 8; i++) own[i] = own[i] * factor * w[i];
  store8(place, own);
}

#define HEAD_NORM(T, name)                                                                        \
  extern "C" __global__ void __launch_bounds__(256) head_norm_##name(                             \
      T* x, i64 token_stride, i64 head_stride, const float* weight, u32 tokens, u32 heads,        \
      u32 dim, u32 lanes, float eps) {                                                            \
    head_norm(x, token_stride, head_stride, weight, tokens, heads, dim, lanes, eps);              \
  }
HEAD_NORM(bf16, bf16)
HEAD_NORM(float, f32)
