// Rotary embedding of one thread's share of a head, for the kernels that turn in place and those that
// turn on the way into the cache.
//
// A pair of position p turns by p * frequency radians. Frequencies come as turns a position, in units
// of 2^-64 turn: the product with p then wraps at whole turns by itself and exactly, so that an angle
// at position 131,072 is as good as one at 1.
#pragma once

#include "types.cuh"

struct Rotation {
  float cos, sin;
};

// Cosine and sine of `phase` * 2^-64 turns, within 1e-7.
DEVICE Rotation rotation(u64 phase) {
  // To the nearest quarter turn, and what is left of it: at most an eighth.
  u64 shifted = phase + (1ull << 61);
  u32 quarter = (u32)(shifted >> 62);
  i64 rest = (i64)(phase - ((u64)quarter << 62));
  // In radians: 2 pi * 2^-64.
  float x = (float)rest * 3.4061215800e-19f;
  float y = x * x;
  // Cephes' polynomials for |x| <= pi / 4.
  float sine = __fmaf_rn(y, -1.9515295891e-4f, 8.3321608736e-3f);
  sine = __fmaf_rn(sine, y, -1.6666654611e-1f);
  sine = __fmaf_rn(sine * y, x, x);
  float cosine = __fmaf_rn(y, 2.443315711809948e-5f, -1.388731625493765e-3f);
  cosine = __fmaf_rn(cosine, y, 4.166664568298827e-2f);
  cosine = __fmaf_rn(cosine * y, y, __fmaf_rn(y, -0.5f, 1.0f));
  bool swapped = quarter & 1;
  Rotation r = {swapped ? sine : cosine, swapped ? cosine : sine};
  if (quarter == 1 || quarter == 2) r.cos = -r.cos;
  if (quarter >= 2) r.sin = -r.sin;
  return r;
}

DEVICE void turn(float& a, float& b, Rotation r) {
  float first = a * r.cos - b * r.sin;
  b = a * r.sin + b * r.cos;
  a = first;
}

// How the heads of a tensor turn.
struct Rope {
  // Phases of one position, one for each pair.
  const u64* phases;
  // Pairs of a head: elements from 2 * pairs on stay as they are.
  u32 pairs;
  u32 dim;
  // Whether pairs are elements 2 i and 2 i + 1, rather than i and i + pairs.
  bool interleaved;
};

// Sixteen elements of a head, of which thread `part` of the dim / 16 has its own: 8 pairs, or 16
// elements that do not turn. pairs and dim are multiples of 8 and 16.
struct Share {
  u32 first, second;
  // The first pair, or NONE.
  u32 pair;
};
constexpr u32 NO_PAIR = 0xffffffffu;

DEVICE Share share_of(const Rope& rope, u32 part) {
  if (part * 8 >= rope.pairs) {
    return {part * 16, part * 16 + 8, NO_PAIR};
  }
  if (rope.interleaved) return {part * 16, part * 16 + 8, part * 8};
  return {part * 8, rope.pairs + part * 8, part * 8};
}

DEVICE void turn_share(const Rope& rope, Share share, u32 position, float (&a)[8], float (&b)[8]) {
  if (share.pair == NO_PAIR) return;
  const ulonglong2* phases = (const ulonglong2*)(rope.phases + share.pair);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    ulonglong2 two = phases[i];
    Rotation r = rotation(two.x * position), s = rotation(two.y * position);
    if (rope.interleaved) {
      float(&c)[8] = i < 2 ? a : b;
      turn(c[i % 2 * 4], c[i % 2 * 4 + 1], r);
      turn(c[i % 2 * 4 + 2], c[i % 2 * 4 + 3], s);
    } else {
      turn(a[2 * i], b[2 * i], r);
      turn(a[2 * i + 1], b[2 * i + 1], s);
    }
  }
}
