// decode_step: attention of one query token over the pages of its stream, dealt to as many blocks as there are.
//
// A task is a row, a key/value head and a share of the stream. The tokens before this one are in the cache since earlier
// steps, so that their keys and values come through the ring, ahead of the queries. This step's key is normed, turned and
// written to the cache by the task that has the stream's end, and used from shared memory.
//
// -D HEAD_DIM=64 | 128, -D GROUP=1..4, query heads of a key/value head.
#pragma once

#include "step_products.cuh"

constexpr u32 LANES = HEAD_DIM / 8;            // of a token
constexpr u32 AT_ONCE = 32 / LANES;            // tokens of a warp
constexpr u32 ROW = 2 * HEAD_DIM;              // bytes of a key or a value
constexpr u32 CHUNK = 32;                      // tokens of a stage
constexpr u32 EACH = CHUNK / WARPS;            // of a warp
constexpr u32 PART = HEAD_DIM + 2;             // floats of a part: sums, maximum, weight
constexpr float LOG2E = 1.4426950408889634f;

#define MINUS_INF __int_as_float(0xff800000)

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// exp2(x - of), where of may be the maximum of nothing.
DEVICE float share_of_maximum(float x, float of) { return x == MINUS_INF ? 0.0f : exp2_approx(x - of); }

struct Stream {
  const bf16* keys;  // of the head
  i64 page_stride, kv_stride, slot_stride;
  const u32* table;  // of the seat
  u32 pages, page_size;

  DEVICE const bf16* at(u32 token) const {
    const u32 page = min(table[token / page_size], pages - 1);
    return keys + page * page_stride + token % page_size * slot_stride;
  }

  // Brings tokens: of a stage first the keys, then the values. Those of a page are one copy where they lie together. All
  // lanes of one warp.
  DEVICE void bring(Ring& ring, u32 begin, u32 end) const {
    const u32 lane = threadIdx.x % 32, run = slot_stride == HEAD_DIM ? page_size : 1;
    for (u32 first = begin; first < end; first += CHUNK) {
      const u32 last = min(first + CHUNK, end), barrier = ring.full + 8 * ring.stage;
      wait_for_room(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) barrier_expect(barrier, 2 * ROW * (last - first));
      __syncwarp();
      for (u32 page = first / run + lane; page * run < last; page += 32) {
        const u32 from = max(first, page * run), to = min(last, (page + 1) * run);
        const bf16* key = at(from);
        const u32 place = ring.memory + ring.stage * STAGE + (from - first) * ROW;
        copy_bulk(place, key, (to - from) * ROW, barrier);
        copy_bulk(place + CHUNK * ROW, key + kv_stride, (to - from) * ROW, barrier);
      }
      __syncwarp();
      ring.go_on();
    }
  }
};

// Softmax so far of the tokens of one lane's group of lanes.
struct Softmax {
  float maximum[GROUP], weight[GROUP], sum[GROUP][8];

  DEVICE void clear() {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      maximum[g] = MINUS_INF, weight[g] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[g][i] = 0.0f;
    }
  }

  template <u32 COUNT>
  DEVICE void add(const float (&q)[GROUP][8], const float (&k)[COUNT][8], const float (&v)[COUNT][8], const bool (&is_one)[COUNT]) {
    float score[GROUP][COUNT];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i += 2) even = __fmaf_rn(q[g][i], k[u][i], even), odd = __fmaf_rn(q[g][i + 1], k[u][i + 1], odd);
        score[g][u] = even + odd;
      }
    }
    // Those of a step do not wait for each other.
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) {
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int u = 0; u < COUNT; u++) score[g][u] += __shfl_xor_sync(ALL_LANES, score[g][u], step);
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float most = maximum[g];
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        score[g][u] = is_one[u] ? score[g][u] : MINUS_INF;
        most = fmaxf(most, score[g][u]);
      }
      const float shrink = share_of_maximum(maximum[g], most);
      maximum[g] = most, weight[g] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[g][i] *= shrink;
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        const float p = share_of_maximum(score[g][u], most);
        weight[g] += p;
#pragma unroll
        for (int i = 0; i < 8; i++) sum[g][i] = __fmaf_rn(p, v[u][i], sum[g][i]);
      }
    }
  }

  // Adds up the groups of lanes of a warp; all lanes get it.
  DEVICE void join_lanes() {
#pragma unroll
    for (u32 step = LANES; step < 32; step *= 2) {
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const float most = fmaxf(maximum[g], __shfl_xor_sync(ALL_LANES, maximum[g], step));
        const float shrink = share_of_maximum(maximum[g], most);
        maximum[g] = most, weight[g] *= shrink;
        weight[g] += __shfl_xor_sync(ALL_LANES, weight[g], step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          sum[g][i] *= shrink;
          sum[g][i] += __shfl_xor_sync(ALL_LANES, sum[g][i], step);
        }
      }
    }
  }
};

// A head as a warp has it: elements 2 lane, 2 lane + 1 and those half a head behind, of HEAD_DIM / 4 lanes.
struct Head {
  float a[2], b[2];

  DEVICE void receive(const u64* words, u32 round) {
    const u32 lane = threadIdx.x % 32;
    if (lane < HEAD_DIM / 4) {
      u32 x, y;
      receive_words(round, words + lane, x, words + HEAD_DIM / 4 + lane, y);
      a[0] = low_of(x), a[1] = high_of(x), b[0] = low_of(y), b[1] = high_of(y);
    } else {
      a[0] = a[1] = b[0] = b[1] = 0.0f;
    }
  }
  DEVICE void norm(const Head& weight, float eps) {
    const float square = a[0] * a[0] + a[1] * a[1] + b[0] * b[0] + b[1] * b[1];
    const float factor = rsqrtf(sum_lanes(square, 32) * (1.0f / HEAD_DIM) + eps);
#pragma unroll
    for (int i = 0; i < 2; i++) a[i] *= factor * weight.a[i], b[i] *= factor * weight.b[i];
  }
  DEVICE void turn(const float2* rotations) {
    const u32 lane = threadIdx.x % 32;
    if (lane >= HEAD_DIM / 4) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 r = rotations[2 * lane + i];
      const float x = a[i] * r.x - b[i] * r.y;
      b[i] = a[i] * r.y + b[i] * r.x, a[i] = x;
    }
  }
  DEVICE void put(float* to, float scale) const {
    const u32 lane = threadIdx.x % 32;
    if (lane >= HEAD_DIM / 4) return;
    *(float2*)(to + 2 * lane) = make_float2(a[0] * scale, a[1] * scale);
    *(float2*)(to + HEAD_DIM / 2 + 2 * lane) = make_float2(b[0] * scale, b[1] * scale);
  }
  // As the cache has it: rounded.
  DEVICE void round_to_bf16() {
#pragma unroll
    for (int i = 0; i < 2; i++) a[i] = to_float(from_float<bf16>(a[i])), b[i] = to_float(from_float<bf16>(b[i]));
  }
  DEVICE void store(bf16* to) const {
    const u32 lane = threadIdx.x % 32;
    if (lane >= HEAD_DIM / 4) return;
    *(u32*)(to + 2 * lane) = pack(a[0], a[1]);
    *(u32*)(to + HEAD_DIM / 2 + 2 * lane) = pack(b[0], b[1]);
  }
  DEVICE static Head of_weights(const float* weight) {
    const u32 lane = threadIdx.x % 32;
    Head h = {};
    if (weight && lane < HEAD_DIM / 4) {
      const float2 x = *(const float2*)(weight + 2 * lane), y = *(const float2*)(weight + HEAD_DIM / 2 + 2 * lane);
      h.a[0] = x.x, h.a[1] = x.y, h.b[0] = y.x, h.b[1] = y.y;
    }
    return h;
  }
};

struct Task {
  u32 row, head, split;
  Stream stream;
  u32 begin, end, old_end;     // tokens of the share, and of those the ones that are in the cache
  bool has_last;
  const u64 *q, *k, *v;        // words of this row and head
  Head norm;                   // weight of the head that this warp norms, if it does
  bool has_norm;
  const float2* rotations;
  float eps, scale;
  bf16* place;                 // where this step's key goes, or null
  u32 round;
};

// Shared memory of attention.
struct AttentionRoom {
  float* parts;    // [WARPS][GROUP][PART]
  float* queries;  // [GROUP][HEAD_DIM], then this step's key and value
};

// Eight elements of bf16 in shared memory.
DEVICE void load8_shared(u32 address, float (&x)[8]) {
  const uint4 y = load_shared16(address);
  const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = low_of(words[i]), x[2 * i + 1] = high_of(words[i]);
}

// Adds the tokens of N stages, of which only the last may have fewer than there is room for. All computing threads.
template <u32 N>
DEVICE void attend_stages(Ring& ring, Softmax& softmax, const float (&q)[GROUP][8], u32 first, u32 end) {
  constexpr u32 TIMES = EACH > AT_ONCE ? EACH / AT_ONCE : 1;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane / LANES, part = lane % LANES;
  const u32 mine = ring.wait_for(N);
  float k[N * TIMES][8], v[N * TIMES][8];
  bool is_one[N * TIMES];
#pragma unroll
  for (u32 s = 0; s < N; s++) {
#pragma unroll
    for (u32 t = 0; t < TIMES; t++) {
      const u32 u = s * TIMES + t, token = warp * EACH + t * AT_ONCE + sub;
      const u32 at = ring.memory + ring.stage * STAGE + token * ROW + part * 16;
      is_one[u] = first + s * CHUNK + token < end;
      load8_shared(at, k[u]);
      load8_shared(at + CHUNK * ROW, v[u]);
      // What a stage had before may be no number.
#pragma unroll
      for (int i = 0; i < 8; i++) v[u][i] = is_one[u] ? v[u][i] : 0.0f;
    }
    ring.go_on();
  }
  softmax.add<N * TIMES>(q, k, v, is_one);
  ring.release(N, mine);
}

// Leaves the parts of all warps in shared memory. All computing threads.
DEVICE void attend(Ring& ring, const Task& task, const AttentionRoom& room) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane / LANES, part = lane % LANES;
  float *key = room.queries + GROUP * HEAD_DIM, *value = key + HEAD_DIM;
  if (warp < GROUP + 2) {
    const bool is_q = warp < GROUP, is_v = warp == GROUP + 1;
    Head head;
    head.receive(is_q ? task.q + warp * (HEAD_DIM / 2) : is_v ? task.v : task.k, task.round);
    if (task.has_norm) head.norm(task.norm, task.eps);
    if (!is_v) head.turn(task.rotations);
    head.round_to_bf16();
    head.put(is_q ? room.queries + warp * HEAD_DIM : is_v ? value : key, is_q ? task.scale * LOG2E : 1.0f);
    if (!is_q && task.has_last && task.place) head.store(task.place + (is_v ? task.stream.kv_stride : 0));
  }
  sync_computing();
  float q[GROUP][8];
#pragma unroll
  for (int g = 0; g < GROUP; g++) load8(room.queries + g * HEAD_DIM + part * 8, q[g]);
  Softmax softmax;
  softmax.clear();
  if (task.has_last && warp == WARPS - 1) {
    float k[1][8], v[1][8];
    load8(key + part * 8, k[0]);
    load8(value + part * 8, v[0]);
    const bool is_one[1] = {sub == 0};
    softmax.add<1>(q, k, v, is_one);
  }
  u32 first = task.begin;
#pragma unroll 1
  for (; first + CHUNK < task.old_end; first += 2 * CHUNK) attend_stages<2>(ring, softmax, q, first, task.old_end);
  if (first < task.old_end) attend_stages<1>(ring, softmax, q, first, task.old_end);
  softmax.join_lanes();
  if (sub == 0) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float* to = room.parts + (warp * GROUP + g) * PART;
#pragma unroll
      for (int i = 0; i < 8; i += 2) *(float2*)(to + part * 8 + i) = make_float2(softmax.sum[g][i], softmax.sum[g][i + 1]);
      if (part == 0) *(float2*)(to + HEAD_DIM) = make_float2(softmax.maximum[g], softmax.weight[g]);
    }
  }
  sync_computing();
}

struct Sum {
  float sum, maximum, weight;
};

// `count` parts of one element put together in their order: at(i) are its sum, maximum and weight in part i.
template <class At>
DEVICE Sum join_parts(u32 count, At at) {
  Sum all = {0.0f, MINUS_INF, 0.0f};
#pragma unroll 8
  for (u32 i = 0; i < count; i++) all.maximum = fmaxf(all.maximum, at(i).maximum);
#pragma unroll 8
  for (u32 i = 0; i < count; i++) {
    const Sum one = at(i);
    const float shrink = share_of_maximum(one.maximum, all.maximum);
    all.sum = __fmaf_rn(shrink, one.sum, all.sum), all.weight = __fmaf_rn(shrink, one.weight, all.weight);
  }
  return all;
}
