// Products of a few rows with a weight matrix, `y = x Wᵀ`: what a decode step of one to three requests is made of.
//
// Each weight is read once, and reading is all that such a product costs. A warp has an output at a time, and has its
// row of weights brought into shared memory ahead, across outputs, by the copy engine: ordinary loads read at 3.6 TB/s
// where that reads at 4.2. Before the kernel in front has ended the first copies are on their way, since weights
// depend on nothing. What stands before a product in a decoder (the norm of its input) and behind it (a bias,
// the residual stream, the gate) is done here too, instead of in kernels of their own.
//
// Names end in the input, the output and the number of rows. x is bf16 [rows, inputs], or the f32 residual stream with
// the weight of a norm; both contiguous, as is W [outputs, inputs] in bf16. inputs is a multiple of 8, pointers
// are 16-byte aligned. Sums are f32, in an order that depends on `inputs` alone: a row's result does not depend on
// the others.
//
// Grid: any number of blocks; one a processor is fast. Block: 512 threads. Dynamic shared memory:
// 98304 + rows * inputs * 2 bytes. May be launched with programmatic stream serialization.

#include "overlap.cuh"
#include "types.cuh"

#include "async_copy.cuh"

constexpr u32 WARPS = 16, THREADS = 32 * WARPS;
constexpr u32 CHUNK = 1024, STAGES = 3;  // weights that a warp has brought at once, and how many times so many
constexpr u32 PIECES = CHUNK / 256;      // 16-byte pieces of a lane

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// ---- inputs: rows in shared memory, as bf16 ----------------------------------------------------------

struct Plain {
  const bf16* x;

  template <int ROWS>
  DEVICE void stage(bf16* rows, u32 inputs) const {
    for (u32 at = threadIdx.x * 8; at < ROWS * inputs; at += THREADS * 8)
      *(uint4*)(rows + at) = *(const uint4*)(x + at);
  }
};

// x / sqrt(mean(x²) + eps) * weight.
struct Normed {
  const float* x;
  const float* weight;
  float eps;

  template <int ROWS>
  DEVICE void stage(bf16* rows, u32 inputs) const {
    __shared__ float room[32];
#pragma unroll 1
    for (int r = 0; r < ROWS; r++) {
      const float* row = x + (u64)r * inputs;
      float sum = 0.0f;
      for (u32 at = threadIdx.x * 8; at < inputs; at += THREADS * 8) {
        float v[8];
        load8(row + at, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = __fmaf_rn(v[i], v[i], sum);
      }
      float factor = 1.0f / sqrtf(sum_block(sum, room) / (float)inputs + eps);
      for (u32 at = threadIdx.x * 8; at < inputs; at += THREADS * 8) {
        float v[8], w[8];
        load8(row + at, v);
        load8(weight + at, w);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * factor * w[i];
        store8(rows + (u64)r * inputs + at, v);
      }
    }
  }
};

// ---- outputs: what becomes of the sums of output o, of row r ------------------------------------------------

struct ToBf16 {
  bf16* y;
  const float* bias;  // or null

  static constexpr u32 MATRICES = 1;
  DEVICE void put(u32 r, u32 o, u32 outputs, float sum, float) const {
    if (bias) sum += bias[o];
    y[(u64)r * outputs + o] = from_float<bf16>(sum);
  }
};

struct ToF32 {
  float* y;

  static constexpr u32 MATRICES = 1;
  DEVICE void put(u32 r, u32 o, u32 outputs, float sum, float) const { y[(u64)r * outputs + o] = sum; }
};

struct AddF32 {
  float* y;

  static constexpr u32 MATRICES = 1;
  DEVICE void put(u32 r, u32 o, u32 outputs, float sum, float) const { y[(u64)r * outputs + o] += sum; }
};

// W is the gates' matrix, then that of what they let through. Both sums are rounded to bf16, as where they are
// kept between two kernels.
template <bool TANH>
struct Gated {
  bf16* y;

  static constexpr u32 MATRICES = 2;
  DEVICE void put(u32 r, u32 o, u32 outputs, float gate, float up) const {
    gate = to_float(from_float<bf16>(gate)), up = to_float(from_float<bf16>(up));
    float x = gate;
    if (TANH) {
      float linear = 1.5957691216f;
      x = gate * __fmaf_rn(gate * gate, linear * 0.044715f, linear);
    }
    y[(u64)r * outputs + o] = from_float<bf16>(gate / (1.0f + __expf(-x)) * up);
  }
};

// ---- the product -------------------------------------------------------------------------------------

// A warp's way through its outputs: of each, the rows of its matrices, of each, chunks.
struct Way {
  u32 output, matrix, chunk;

  // The chunk behind this one.
  DEVICE void go_on(u32 chunks, u32 matrices, u32 step) {
    if (++chunk < chunks) return;
    chunk = 0;
    if (++matrix < matrices) return;
    matrix = 0, output += step;
  }
};

template <int ROWS, class Input, class Output>
DEVICE void gemv(const Input& input, const bf16* weight, const Output& output, u32 inputs, u32 outputs) {
  extern __shared__ __align__(128) char memory[];
  __shared__ u64 barrier_memory[WARPS * STAGES];
  KERNEL_BEHIND_MAY_BEGIN();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bf16* ring = (bf16*)memory + warp * STAGES * CHUNK;
  const u32 to = (u32)__cvta_generic_to_shared(ring);
  const u32 barriers = (u32)__cvta_generic_to_shared(barrier_memory + warp * STAGES);
  if (lane < STAGES) barrier_init(barriers + lane * 8);
  async_proxy_fence();
  __syncwarp();

  const u32 chunks = (inputs + CHUNK - 1) / CHUNK, step = WARPS * gridDim.x;
  // Neighbouring outputs are in different blocks, so that no processor has more than one more than another.
  Way next = {warp * gridDim.x + blockIdx.x, 0, 0}, at = next;
  auto bring = [&](u32 stage) {
    if (next.output >= outputs) return;
    const bf16* from = weight + ((u64)next.matrix * outputs + next.output) * inputs + next.chunk * CHUNK;
    const u32 bytes = 2 * min(CHUNK, inputs - next.chunk * CHUNK);
    const u32 target = to + stage * 2 * CHUNK, barrier = barriers + stage * 8;
#if COPY_ENGINE
    if (lane == 0) {
      barrier_expect(barrier, bytes);
      copy_bulk(target, from, bytes, barrier);
    }
#else
    for (u32 i = lane * 16; i < bytes; i += 512) copy_async16(target + i, (const char*)from + i);
    copy_async_arrive(barrier);
#endif
    next.go_on(chunks, Output::MATRICES, step);
  };
  for (u32 s = 0; s < STAGES; s++) bring(s);

  AFTER_KERNEL_BEFORE();
  bf16* rows = (bf16*)memory + WARPS * STAGES * CHUNK;
  input.template stage<ROWS>(rows, inputs);
  __syncthreads();

  float sum[ROWS] = {}, gate[ROWS] = {};
  for (u32 stage = 0, parity = 0; at.output < outputs;) {
    barrier_wait(barriers + stage * 8, parity);
    const bf16* weights = ring + stage * CHUNK;
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
      const u32 place = p * 256 + lane * 8, i = at.chunk * CHUNK + place;
      if (i >= inputs) continue;
      const uint4 w = *(const uint4*)(weights + place);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const uint4 x = *(const uint4*)(rows + r * inputs + i);
        float a = sum[r];
        a = __fmaf_rn(low(w.x), low(x.x), a), a = __fmaf_rn(high(w.x), high(x.x), a);
        a = __fmaf_rn(low(w.y), low(x.y), a), a = __fmaf_rn(high(w.y), high(x.y), a);
        a = __fmaf_rn(low(w.z), low(x.z), a), a = __fmaf_rn(high(w.z), high(x.z), a);
        a = __fmaf_rn(low(w.w), low(x.w), a), a = __fmaf_rn(high(w.w), high(x.w), a);
        sum[r] = a;
      }
    }
    __syncwarp();
    bring(stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
    if (at.chunk + 1 == chunks) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float total = sum_lanes(sum[r], 32);
        sum[r] = 0.0f;
        if (at.matrix + 1 < Output::MATRICES) gate[r] = total;
        else if (lane == 0) output.put(r, at.output, outputs, Output::MATRICES == 1 ? total : gate[r], total);
      }
    }
    at.go_on(chunks, Output::MATRICES, step);
  }
}

#define INPUT_plain const bf16* x
#define MAKE_plain Plain{x}
#define INPUT_normed const float* x, const float* norm, float eps
#define MAKE_normed Normed{x, norm, eps}
#define OUTPUT_bf16 bf16 *y, const float *bias
#define MAKE_bf16 ToBf16{y, bias}
#define OUTPUT_f32 float* y
#define MAKE_f32 ToF32{y}
#define OUTPUT_add float* y
#define MAKE_add AddF32{y}
#define OUTPUT_silu bf16* y
#define MAKE_silu Gated<false>{y}
#define OUTPUT_gelu bf16* y
#define MAKE_gelu Gated<true>{y}

#define GEMV(input, output, rows)                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) gemv_##input##_##output##_##rows(  \
      INPUT_##input, const bf16* weight, OUTPUT_##output, u32 inputs, u32 outputs) {          \
    gemv<rows>(MAKE_##input, weight, MAKE_##output, inputs, outputs);                         \
  }
#define GEMV_ROWS(input, output) \
  GEMV(input, output, 1)         \
  GEMV(input, output, 2)         \
  GEMV(input, output, 3)
GEMV_ROWS(normed, bf16)
GEMV_ROWS(normed, f32)
GEMV_ROWS(normed, silu)
GEMV_ROWS(normed, gelu)
GEMV_ROWS(plain, bf16)
GEMV_ROWS(plain, add)
