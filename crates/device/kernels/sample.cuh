// What the sampling kernels share: a row of logits with its repetition penalty, the order of its
// entries, and the weights of tokens, bit for bit as the CPU computes them.
#pragma once

#include "types.cuh"

// How one row is sampled.
struct SampleRow {
  u64 seed;
  u32 choice, position;
  // 0 takes the best token.
  float temperature;
  // 0 is off.
  u32 top_k;
  // 1 is off.
  float top_p;
  // 0 is off.
  float min_p;
  // 1 is off.
  float penalty;
  // Which of the sets of seen tokens is this row's, or NO_SET.
  u32 set;
  u64 unused;
};
constexpr u32 NO_SET = 0xffffffffu;

struct Sampled {
  u32 token, status;
  float logprob;
};
constexpr u32 BAD_LOGITS = 1;

// Entries of a row whose weights are summed in float32, in 16 lanes.
constexpr u32 BLOCK = 256;
// Threads that have a block between them, 4 lanes each.
constexpr u32 QUAD = 4;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// A number in the order of logits; of NaN the greatest of all. 0 and -0 are equal.
DEVICE u32 key_of(float x) {
  u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float of_key(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
// The key of minus infinity, and that of plus infinity.
constexpr u32 KEY_LEAST = 0x007fffffu, KEY_INFINITE = 0xff800000u;

// An entry: best first is greatest first, the smaller id before of equals.
DEVICE u64 entry_of(u32 key, u32 token) { return (u64)key << 32 | (u32)~token; }
DEVICE u32 token_of(u64 entry) { return ~(u32)entry; }
// Whether the best entry of a row makes it unusable: NaN, infinite, or nothing possible.
DEVICE bool is_bad(u64 best) {
  u32 key = (u32)(best >> 32);
  return key >= KEY_INFINITE || key <= KEY_LEAST;
}

// A row of logits as it is drawn from.
struct Logits {
  const float* row;
  u32 count;
  // Tokens under the penalty, a bit each, or null.
  const u32* seen;
  float penalty;
  bool is_wide;

  // Four entries from `at`, a multiple of 4 below `count`; minus infinity past the end.
  DEVICE void load4(u32 at, float (&x)[4]) const {
    if (is_wide && at + 4 <= count) {
      float4 all = *(const float4*)(row + at);
      x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; i++) x[i] = at + i < count ? row[at + i] : minus_infinity();
    }
  }
  // The same after the penalty.
  DEVICE void penalise4(u32 at, float (&x)[4]) const {
    if (!seen) return;
    u32 bits = seen[at / 32] >> (at % 32);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      if (bits >> i & 1) x[i] = x[i] > 0.0f ? __fdiv_rn(x[i], penalty) : __fmul_rn(x[i], penalty);
    }
  }
  DEVICE float at(u32 token) const {
    float x = row[token];
    if (!seen || !(seen[token / 32] >> (token % 32) & 1)) return x;
    return x > 0.0f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
  }
};

DEVICE Logits logits_of(const float* rows, i64 stride, u32 count, const u32* seen, u32 set_words,
                        const SampleRow& how) {
  const float* row = rows + blockIdx.y * stride;
  const u32* set = how.set == NO_SET || how.penalty == 1.0f ? nullptr
                                                            : seen + (u64)how.set * set_words;
  return {row, count, set, how.penalty, ((u64)row & 15) == 0};
}

// e^x, each operation rounded as `device::ops` rounds it.
DEVICE float exp_rounded(float x) {
  x = 89.0f < x ? 89.0f : x;
  x = -104.0f > x ? -104.0f : x;
  int n = __float2int_rn(__fmul_rn(x, 1.44269504088896340736f));
  float nf = __int2float_rn(n);
  float r = __fmaf_rn(nf, -0.6933594f, x);
  r = __fmaf_rn(nf, 2.1219444e-4f, r);
  float p = 1.9875691e-4f;
  p = __fmaf_rn(p, r, 1.3981999e-3f);
  p = __fmaf_rn(p, r, 8.333452e-3f);
  p = __fmaf_rn(p, r, 4.1665796e-2f);
  p = __fmaf_rn(p, r, 1.6666665e-1f);
  p = __fmaf_rn(p, r, 5e-1f);
  p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  int half = n >> 1;
  float first = __int_as_float((half + 127) << 23);
  float second = __int_as_float((n - half + 127) << 23);
  return __fmul_rn(__fmul_rn(p, first), second);
}

// What differences of logits are multiplied by; the reciprocal of the smallest temperatures is infinite.
DEVICE float scale_of(float temperature) { return fminf(__fdiv_rn(1.0f, temperature), 3.4028235e38f); }

// The weight of a logit; that of the best is 1.
DEVICE float weight_of(float x, float best, float scale) {
  return exp_rounded(__fmul_rn(__fsub_rn(x, best), scale));
}

// Weights and their sums in units of 2^-40: sums of whole numbers do not depend on their order.
constexpr double UNITS = 1099511627776.0;
DEVICE u64 units_of(float weight) { return (u64)((double)weight * UNITS); }

// Whether the row's weights are summed over the whole vocabulary.
DEVICE bool needs_sums(const SampleRow& how) { return how.temperature > 0.0f && how.top_k == 0; }

// The 53 random bits of a row's place in its request's sequence (Philox 4x32-10, Salmon et al. 2011).
DEVICE u64 random_bits(const SampleRow& how) {
  u32 c0 = how.position, c1 = 0, c2 = how.choice, c3 = 0;
  u32 key0 = (u32)how.seed, key1 = (u32)(how.seed >> 32);
#pragma unroll 1
  for (int round = 0; round < 10; round++) {
    u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(b >> 32) ^ c1 ^ key0, c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ key1, c3 = (u32)a;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return ((u64)c0 << 32 | c1) >> 11;
}

// `bits` of 2^53 of `total`, rounded down.
DEVICE u64 share_of_total(u64 bits, u64 total) {
  return __umul64hi(bits, total) << 11 | bits * total >> 53;
}

DEVICE u64 max_warp(u64 x) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) {
    u64 other = __shfl_xor_sync(ALL_LANES, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// The greatest of `count` numbers, for every thread of a warp.
DEVICE u64 max_of(const u64* from, u32 count) {
  u64 best = 0;
  for (u32 i = threadIdx.x % 32; i < count; i += 32) best = from[i] > best ? from[i] : best;
  return max_warp(best);
}
