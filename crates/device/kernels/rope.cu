// Rotary embedding in place: `(a, b)` becomes `(a cos - b sin, a sin + b cos)`.
//
// Names end in the element type. Sizes and strides count elements.

#include "overlap.cuh"
#include "rope.cuh"

// Turns queries and keys by the position of each token.
//
// q [tokens, q_heads, dim] and k [tokens, k_heads, dim] with a stride from token to token and from
// head to head, positions [tokens], phases [pairs] (see rope.cuh). Keys may be left out: k_heads 0.
// With `wide`, pointers are 16-byte aligned, strides multiples of 8, `pairs` a multiple of 8, `dim` of
// 16, and an item is 8 pairs; otherwise it is one. Grid: (tokens, ceil((q_heads + k_heads) * items of
// a head / blockDim.x)). Block: any.
template <class T>
DEVICE void rope_in_place(T* q, i64 q_token_stride, i64 q_head_stride, u32 q_heads, T* k,
                          i64 k_token_stride, i64 k_head_stride, u32 k_heads, const u32* positions,
                          const u64* phases, u32 pairs, u32 dim, u32 interleaved, u32 wide) {
  IN_TURN();
  Rope rope = {phases, pairs, dim, interleaved != 0};
  u32 items = wide ? pairs / 8 : pairs;
  u32 item = blockIdx.y * blockDim.x + threadIdx.x;
  u32 head = item / items, part = item % items;
  if (head >= q_heads + k_heads) return;
  i64 token = blockIdx.x;
  T* place = head < q_heads ? q + token * q_token_stride + head * q_head_stride
                            : k + token * k_token_stride + (head - q_heads) * k_head_stride;
  u32 position = positions[token];
  if (!wide) {
    u32 first = interleaved ? 2 * part : part, second = interleaved ? first + 1 : part + pairs;
    float a = to_float(place[first]), b = to_float(place[second]);
    turn(a, b, rotation(phases[part] * position));
    place[first] = from_float<T>(a);
    place[second] = from_float<T>(b);
    return;
  }
  Share share = share_of(rope, part);
  float a[8], b[8];
  load8(place + share.first, a);
  load8(place + share.second, b);
  turn_share(rope, share, position, a, b);
  store8(place + share.first, a);
  store8(place + share.second, b);
}

#define ROPE(T, name)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) rope_##name(                                  \
      T* q, i64 q_token_stride, i64 q_head_stride, u32 q_heads, T* k, i64 k_token_stride,         \
      i64 k_head_stride, u32 k_heads, const u32* positions, const u64* phases, u32 pairs,         \
      u32 dim, u32 interleaved, u32 wide) {                                                       \
    rope_in_place(q, q_token_stride, q_head_stride, q_heads, k, k_token_stride, k_head_stride,    \
                  k_heads, positions, phases, pairs, dim, interleaved, wide);                     \
  }
ROPE(bf16, bf16)
ROPE(float, f32)
