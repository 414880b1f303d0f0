// The paged cache of keys and values: rows in, rows out, pages copied, the page table kept up to date.
//
// Names end in the types: activations, then the cache's. Sizes and strides count elements unless they
// say bytes. Pages are found by four strides, so that any order of pages, keys and values, heads and
// slots will do; the elements of a head lie together. What names a page or a slot that there is not is
// skipped. Pointers are 16-byte aligned (8-byte for an fp8 cache), strides and `dim` multiples of 8, unless a
// kernel says otherwise.
//
// A cache of int8 has the scale of each row, a float, in the four bytes behind it, which are the same bytes as those of a
// cache on the CPU. Its pointers and strides are multiples of 4, and so is `dim`.

#include "overlap.cuh"
#include "rope.cuh"

// Where one layer's keys and values lie.
template <class C>
struct Pages {
  C* keys;
  i64 page_stride, kv_stride, head_stride, slot_stride;
  u32 num_pages, page_size;

  DEVICE bool has(u32 page, u32 slot) const { return page < num_pages && slot < page_size; }
  // `which` is 0 for keys, 1 for values.
  DEVICE C* at(u32 page, u32 slot, u32 which, u32 head) const {
    return keys + page * page_stride + slot * slot_stride + which * kv_stride + head * head_stride;
  }
};

// How large a step of a row is, and how many steps 1 is: a row's largest value is 127 steps.
struct Steps {
  float step, steps;

  // `most` is the largest magnitude of the row, whose values are all finite where `finite`.
  DEVICE Steps(float most, bool finite) {
    step = most / 127.0f, steps = 127.0f / most;
    if (!finite) {
      // A row that is not finite has no scale that is a number, so that whoever reads it finds out.
      step = __uint_as_float(0x7fc00000u), steps = 0.0f;
    } else if (step < 1.17549435e-38f) {
      step = 0.0f, steps = 0.0f;
    } else if (step * 127.0f > 3.40282347e38f) {
      // All steps together must not be more than there are numbers for.
      step = __uint_as_float(__float_as_uint(step) - 1);
    }
  }
  DEVICE void store8(signed char* to, const float (&x)[8]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float* y = x + 4 * h;
      ((u32*)to)[h] = of(y[0]) | of(y[1]) << 8 | of(y[2]) << 16 | of(y[3]) << 24;
    }
  }
  DEVICE u32 of(float x) const { return steps == 0.0f ? 0 : (u32)__float2int_rn(x * steps) & 0xff; }
};

DEVICE float max_lanes(float x, u32 lanes) {
  for (u32 step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.40282347e38f; }

DEVICE float to_float(signed char x) { return (float)x; }

template <class C>
constexpr bool is_scaled = false;
template <>
constexpr bool is_scaled<signed char> = true;

template <class From, class To>
DEVICE void copy8(const From* from, To* to) {
  float x[8];
  load8(from, x);
  store8(to, x);
}

template <class T>
DEVICE void copy8(const T* from, T* to) {
  if constexpr (sizeof(T) == 4) {
    ((uint4*)to)[0] = ((const uint4*)from)[0];
    ((uint4*)to)[1] = ((const uint4*)from)[1];
  } else {
    *(uint4*)to = *(const uint4*)from;
  }
}

// Writes the keys and values of a step into its slots.
//
// k, v [tokens, heads, dim] with a stride from token to token and from head to head; write_page,
// write_slot [tokens]. With `wide` an item is 8 elements; without it one, and nothing need be aligned.
// Grid: (tokens, ceil(2 * heads * items of a head / blockDim.x)). Block: any.
template <class T, class C>
DEVICE void kv_write(const T* k, i64 k_token_stride, i64 k_head_stride, const T* v,
                     i64 v_token_stride, i64 v_head_stride, const u32* write_page,
                     const u32* write_slot, Pages<C> pages, u32 heads, u32 dim, u32 wide) {
  IN_TURN();
  u32 items = wide ? dim / 8 : dim;
  u32 item = blockIdx.y * blockDim.x + threadIdx.x;
  u32 row = item / items, part = item % items;
  if (row >= 2 * heads) return;
  u32 which = row >= heads, head = which ? row - heads : row;
  i64 token = blockIdx.x;
  const T* from = which ? v + token * v_token_stride + head * v_head_stride
                        : k + token * k_token_stride + head * k_head_stride;
  u32 page = write_page[token], slot = write_slot[token];
  if (!pages.has(page, slot)) return;
  C* to = pages.at(page, slot, which, head);
  if (wide) {
    copy8(from + part * 8, to + part * 8);
  } else {
    to[part] = from_float<C>(to_float(from[part]));
  }
}

#define KV_WRITE(T, name, C, cache)                                                               \
  extern "C" __global__ void __launch_bounds__(256) kv_write_##name##_##cache(                    \
      const T* k, i64 k_token_stride, i64 k_head_stride, const T* v, i64 v_token_stride,          \
      i64 v_head_stride, const u32* write_page, const u32* write_slot, C* keys, i64 page_stride,  \
      i64 kv_stride, i64 head_stride, i64 slot_stride, u32 num_pages, u32 page_size, u32 heads,   \
      u32 dim, u32 wide) {                                                                        \
    Pages<C> pages = {keys,        page_stride, kv_stride, head_stride,                           \
                      slot_stride, num_pages,   page_size};                                       \
    kv_write(k, k_token_stride, k_head_stride, v, v_token_stride, v_head_stride, write_page,      \
             write_slot, pages, heads, dim, wide);                                                \
  }
KV_WRITE(bf16, bf16, bf16, bf16)
KV_WRITE(bf16, bf16, f16, f16)
KV_WRITE(bf16, bf16, float, f32)
KV_WRITE(bf16, bf16, e4m3, fp8)
KV_WRITE(float, f32, bf16, bf16)
KV_WRITE(float, f32, f16, f16)
KV_WRITE(float, f32, float, f32)
KV_WRITE(float, f32, e4m3, fp8)
KV_WRITE(f16, f16, f16, f16)

// The same into a cache of int8: a warp has a row. Nothing of the source need be aligned; `wide` is not looked at.
// Grid: (tokens, ceil(2 * heads * 32 / blockDim.x)). Block: whole warps.
template <class T>
DEVICE void kv_write_scaled(const T* k, i64 k_token_stride, i64 k_head_stride, const T* v, i64 v_token_stride,
                            i64 v_head_stride, const u32* write_page, const u32* write_slot,
                            Pages<signed char> pages, u32 heads, u32 dim) {
  IN_TURN();
  u32 row = (blockIdx.y * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= 2 * heads) return;
  u32 which = row >= heads, head = which ? row - heads : row;
  i64 token = blockIdx.x;
  const T* from = which ? v + token * v_token_stride + head * v_head_stride
                        : k + token * k_token_stride + head * k_head_stride;
  u32 page = write_page[token], slot = write_slot[token];
  if (!pages.has(page, slot)) return;
  float most = 0.0f;
  bool finite = true;
  for (u32 i = lane; i < dim; i += 32) {
    float x = to_float(from[i]);
    most = fmaxf(most, fabsf(x)), finite &= is_finite(x);
  }
  Steps steps(max_lanes(most, 32), __all_sync(ALL_LANES, finite));
  signed char* to = pages.at(page, slot, which, head);
  for (u32 i = lane; i < dim; i += 32) to[i] = (signed char)steps.of(to_float(from[i]));
  if (lane == 0) *(float*)(to + dim) = steps.step;
}

#define KV_WRITE_SCALED(T, name)                                                                  \
  extern "C" __global__ void __launch_bounds__(256) kv_write_##name##_i8(                         \
      const T* k, i64 k_token_stride, i64 k_head_stride, const T* v, i64 v_token_stride,          \
      i64 v_head_stride, const u32* write_page, const u32* write_slot, signed char* keys,         \
      i64 page_stride, i64 kv_stride, i64 head_stride, i64 slot_stride, u32 num_pages,            \
      u32 page_size, u32 heads, u32 dim, u32 wide) {                                              \
    Pages<signed char> pages = {keys,        page_stride, kv_stride, head_stride,                 \
                                slot_stride, num_pages,   page_size};                             \
    kv_write_scaled(k, k_token_stride, k_head_stride, v, v_token_stride, v_head_stride,           \
                    write_page, write_slot, pages, heads, dim);                                   \
  }
KV_WRITE_SCALED(bf16, bf16)
KV_WRITE_SCALED(float, f32)

// Reads back the slots of a step, as float32. For tests and tools: an item is one element.
//
// k, v [tokens, heads, dim], contiguous. Grid: (tokens, ceil(2 * heads * dim / blockDim.x)).
template <class C>
DEVICE void kv_read(float* k, float* v, const u32* write_page, const u32* write_slot,
                    Pages<C> pages, u32 heads, u32 dim) {
  u32 item = blockIdx.y * blockDim.x + threadIdx.x;
  u32 row = item / dim, at = item % dim;
  if (row >= 2 * heads) return;
  u32 which = row >= heads, head = which ? row - heads : row;
  i64 token = blockIdx.x;
  u32 page = write_page[token], slot = write_slot[token];
  float x = 0.0f;
  if (pages.has(page, slot)) {
    const C* from = pages.at(page, slot, which, head);
    x = to_float(from[at]);
    if constexpr (is_scaled<C>) x *= *(const float*)(from + dim);
  }
  (which ? v : k)[(token * heads + head) * dim + at] = x;
}

#define KV_READ(C, cache)                                                                         \
  extern "C" __global__ void __launch_bounds__(256) kv_read_##cache(                              \
      float* k, float* v, const u32* write_page, const u32* write_slot, C* keys,                  \
      i64 page_stride, i64 kv_stride, i64 head_stride, i64 slot_stride, u32 num_pages,            \
      u32 page_size, u32 heads, u32 dim) {                                                        \
    Pages<C> pages = {keys,        page_stride, kv_stride, head_stride,                           \
                      slot_stride, num_pages,   page_size};                                       \
    kv_read(k, v, write_page, write_slot, pages, heads, dim);                                     \
  }
KV_READ(bf16, bf16)
KV_READ(f16, f16)
KV_READ(float, f32)
KV_READ(e4m3, fp8)
KV_READ(signed char, i8)

// Normalizes queries and keys head by head (where weights are given), turns them by the position of
// each token, writes keys and values into the step's slots, and leaves the queries in their place:
// what lies between the projections of a layer and its attention, in one pass.
//
// q [tokens, q_heads, dim], k and v [tokens, heads, dim], with strides; the heads of each lie `dim`
// apart. q_weight, k_weight [dim] or null. positions, write_page, write_slot [tokens]; phases [pairs],
// pairs 0 for no turning. dim is a multiple of 16, pairs of 8. A head has `lanes` neighbouring threads,
// the power of two from dim / 16 on, at most 32. Grid: (tokens, ceil((q_heads + 2 * heads) * lanes /
// blockDim.x)). Block: whole warps.
template <class T, class C>
DEVICE void rope_write(T* q, i64 q_token_stride, u32 q_heads, const T* k, i64 k_token_stride,
                       const T* v, i64 v_token_stride, u32 heads, u32 dim, u32 lanes,
                       const float* q_weight, const float* k_weight, float eps,
                       const u32* positions, const u64* phases, u32 pairs, u32 interleaved,
                       const u32* write_page, const u32* write_slot, Pages<C> pages) {
  IN_TURN();
  u32 thread = blockIdx.y * blockDim.x + threadIdx.x;
  u32 row = thread / lanes, part = thread % lanes;
  bool has_some = row < q_heads + 2 * heads && part * 16 < dim;
  bool is_q = row < q_heads, is_v = row >= q_heads + heads;
  u32 head = is_q ? row : is_v ? row - q_heads - heads : row - q_heads;
  i64 token = blockIdx.x;
  const T* from = is_q ? q + token * q_token_stride
                       : is_v ? v + token * v_token_stride : k + token * k_token_stride;
  from += head * dim;
  Rope rope = {phases, is_v ? 0 : pairs, dim, interleaved != 0};
  Share share = share_of(rope, part);
  float a[8] = {}, b[8] = {};
  if (has_some) {
    load8(from + share.first, a);
    load8(from + share.second, b);
  }
  // The sum is taken by all lanes of a warp, whichever of them need it.
  if (q_weight || k_weight) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = __fmaf_rn(b[i], b[i], __fmaf_rn(a[i], a[i], sum));
    float factor = 1.0f / sqrtf(sum_lanes(sum, lanes) / (float)dim + eps);
    const float* weight = is_q ? q_weight : is_v ? nullptr : k_weight;
    if (has_some && weight) {
      float w[8];
      load8(weight + share.first, w);
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] = a[i] * factor * w[i];
      load8(weight + share.second, w);
#pragma unroll
      for (int i = 0; i < 8; i++) b[i] = b[i] * factor * w[i];
    }
  }
  if constexpr (!is_scaled<C>) {
    if (!has_some) return;
  }
  // The lanes of a head behind its end have elements of zero, which stay zero.
  if (has_some) turn_share(rope, share, positions[token], a, b);
  if constexpr (is_scaled<C>) {
    float most = 0.0f;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      most = fmaxf(most, fmaxf(fabsf(a[i]), fabsf(b[i])));
      finite &= is_finite(a[i]) && is_finite(b[i]);
    }
    most = max_lanes(most, lanes);
    Steps steps(most, max_lanes(finite ? 0.0f : 1.0f, lanes) == 0.0f);
    if (!has_some) return;
    if (!is_q) {
      u32 page = write_page[token], slot = write_slot[token];
      if (!pages.has(page, slot)) return;
      C* to = pages.at(page, slot, is_v, head);
      steps.store8(to + share.first, a);
      steps.store8(to + share.second, b);
      if (part == 0) *(float*)(to + dim) = steps.step;
      return;
    }
  }
  if (is_q) {
    T* to = q + token * q_token_stride + head * dim;
    store8(to + share.first, a);
    store8(to + share.second, b);
  } else {
    u32 page = write_page[token], slot = write_slot[token];
    if (!pages.has(page, slot)) return;
    C* to = pages.at(page, slot, is_v, head);
    if constexpr (!is_scaled<C>) {
      store8(to + share.first, a);
      store8(to + share.second, b);
    }
  }
}

#define ROPE_WRITE(T, name, C, cache)                                                             \
  extern "C" __global__ void __launch_bounds__(256) rope_write_##name##_##cache(                  \
      T* q, i64 q_token_stride, u32 q_heads, const T* k, i64 k_token_stride, const T* v,          \
      i64 v_token_stride, u32 heads, u32 dim, u32 lanes, const float* q_weight,                   \
      const float* k_weight, float eps, const u32* positions, const u64* phases, u32 pairs,       \
      u32 interleaved, const u32* write_page, const u32* write_slot, C* keys, i64 page_stride,    \
      i64 kv_stride, i64 head_stride, i64 slot_stride, u32 num_pages, u32 page_size) {            \
    Pages<C> pages = {keys,        page_stride, kv_stride, head_stride,                           \
                      slot_stride, num_pages,   page_size};                                       \
    rope_write(q, q_token_stride, q_heads, k, k_token_stride, v, v_token_stride, heads, dim,      \
               lanes, q_weight, k_weight, eps, positions, phases, pairs, interleaved, write_page, \
               write_slot, pages);                                                                \
  }
ROPE_WRITE(bf16, bf16, bf16, bf16)
ROPE_WRITE(bf16, bf16, f16, f16)
ROPE_WRITE(bf16, bf16, float, f32)
ROPE_WRITE(bf16, bf16, e4m3, fp8)
ROPE_WRITE(float, f32, bf16, bf16)
ROPE_WRITE(float, f32, f16, f16)
ROPE_WRITE(float, f32, float, f32)
ROPE_WRITE(float, f32, e4m3, fp8)
ROPE_WRITE(bf16, bf16, signed char, i8)
ROPE_WRITE(float, f32, signed char, i8)

// Copies pages: pair p is (from, to) in `pairs` [count]. No page may be both a source and a target,
// nor twice a target.
//
// A page is `runs` runs of run_bytes, run_stride bytes apart; one run where all its layers lie together.
// Addresses, strides and run_bytes are multiples of 16. Grid: (count, any, at most 65535: blocks that
// share a page).
// Block: any.
extern "C" __global__ void __launch_bounds__(256) copy_pages(
    u8* pool, u32 num_pages, const uint2* pairs, u64 page_stride_bytes, u32 runs,
    u64 run_stride_bytes, u64 run_bytes) {
  uint2 pair = pairs[blockIdx.x];
  if (pair.x >= num_pages || pair.y >= num_pages) return;
  const u8* from = pool + pair.x * page_stride_bytes;
  u8* to = pool + pair.y * page_stride_bytes;
  u64 words = run_bytes / 16, step = (u64)gridDim.y * blockDim.x;
#pragma unroll 1
  for (u32 run = 0; run < runs; run++) {
    const uint4* source = (const uint4*)(from + run * run_stride_bytes);
    uint4* target = (uint4*)(to + run * run_stride_bytes);
    u64 at = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    // Four loads in flight.
#pragma unroll 1
    for (; at + 3 * step < words; at += 4 * step) {
      uint4 a = source[at], b = source[at + step], c = source[at + 2 * step],
            d = source[at + 3 * step];
      target[at] = a, target[at + step] = b, target[at + 2 * step] = c, target[at + 3 * step] = d;
    }
    for (; at < words; at += step) target[at] = source[at];
  }
}

// Brings a resident page table up to date: change c sets entry changes[c].x, below `entries`, to
// changes[c].y. No entry is named twice. Grid: ceil(count / blockDim.x). Block: any.
extern "C" __global__ void __launch_bounds__(256) table_apply(u32* table, u32 entries,
                                                              const uint2* changes, u32 count) {
  u32 c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < count && changes[c].x < entries) table[changes[c].x] = changes[c].y;
}
