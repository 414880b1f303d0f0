// Element types and 16-byte accesses for the small kernels. NVRTC alone has no toolkit header, so
// none is included: conversions are PTX, or bit arithmetic where the architecture has no
// instruction for them.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
// 8-bit float with 4 exponent and 3 mantissa bits, finite, one NaN; stored with scale 1.
struct e4m3 {
  u8 bits;
};

#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- one element ------------------------------------------------------------------------------

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE float to_float(e4m3 x) {
  u32 sign = (u32)(x.bits & 0x80) << 24, rest = x.bits & 0x7f;
  if (rest == 0x7f) return __uint_as_float(sign | 0x7fc00000u);
  // As the high part of a float32 of exponent bias 127, scaled by 2^(127 - 7); this also turns
  // subnormals into normal numbers.
  return __uint_as_float(sign | (rest << 20)) * __uint_as_float((127u + 120u) << 23);
}

template <class T>
DEVICE T from_float(float x);

template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
DEVICE f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
// To the nearest, ties to even; beyond the greatest number, that number. Any NaN becomes 0x7f.
template <>
DEVICE e4m3 from_float<e4m3>(float x) {
  e4m3 y;
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  y.bits = (u8)pair;
#else
  u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
  float size = fabsf(x);
  u32 code;
  if (x != x) {
    code = 0x7f;
  } else if (size >= 448.0f) {
    code = 0x7e;
  } else if (size < 0.015625f) {
    // Below 2^-6 steps are 2^-9: adding 1.5 * 2^14 leaves just those bits.
    code = __float_as_uint(size + 24576.0f) - __float_as_uint(24576.0f);
  } else {
    u32 magnitude = bits & 0x7fffffffu;
    magnitude += 0x7ffffu + (magnitude >> 20 & 1);
    code = (magnitude >> 20) - (120u << 3);
    code = code > 0x7e ? 0x7e : code;
  }
  y.bits = (u8)(x != x ? code : sign | code);
#endif
  return y;
}

// ---- eight elements, 16 bytes of a 2-byte type --------------------------------------------------

DEVICE void load8(const float* from, float (&x)[8]) {
  float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
  x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE void store8(float* to, const float (&x)[8]) {
  ((float4*)to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  ((float4*)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Types of 2 bytes: two to a word.
template <class T>
DEVICE void load8(const T* from, float (&x)[8]) {
  static_assert(sizeof(T) == 2, "an overload for this size is missing");
  uint4 all = *(const uint4*)from;
  u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    T low, high;
    low.bits = (u16)words[i];
    high.bits = (u16)(words[i] >> 16);
    x[2 * i] = to_float(low);
    x[2 * i + 1] = to_float(high);
  }
}
template <class T>
DEVICE void store8(T* to, const float (&x)[8]) {
  static_assert(sizeof(T) == 2, "an overload for this size is missing");
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = (u32)from_float<T>(x[2 * i]).bits | (u32)from_float<T>(x[2 * i + 1]).bits << 16;
  }
  *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void load8(const e4m3* from, float (&x)[8]) {
  uint2 all = *(const uint2*)from;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    e4m3 one;
    one.bits = (u8)((i < 4 ? all.x : all.y) >> (i % 4 * 8));
    x[i] = to_float(one);
  }
}
DEVICE void store8(e4m3* to, const float (&x)[8]) {
  u32 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    words[i / 4] |= (u32)from_float<e4m3>(x[i]).bits << (i % 4 * 8);
  }
  *(uint2*)to = make_uint2(words[0], words[1]);
}

// ---- sums -----------------------------------------------------------------------------------

// Sum over `lanes` neighbouring lanes (a power of two); all of them get it, in one fixed order.
DEVICE float sum_lanes(float x, u32 lanes) {
  for (u32 step = lanes / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(ALL_LANES, x, step);
  }
  return x;
}

// Sum over the block, in one fixed order; every thread gets it. `room` is 32 floats of shared
// memory, which may be used again at once. All threads must call it; a block is whole warps.
DEVICE float sum_block(float x, float* room) {
  x = sum_lanes(x, 32);
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane == 0) room[warp] = x;
  __syncthreads();
  x = sum_lanes(lane < warps ? room[lane] : 0.0f, 32);
  __syncthreads();
  return x;
}
