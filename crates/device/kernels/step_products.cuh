// decode_step: products of up to eight rows with weights that a warp of their own brings ahead.
//
// A block has every gridDim.x-th tile of eight outputs. The bringing warp goes through the tiles of all products of all
// layers in order and fills a ring of stages, each eight rows of up to COLUMNS weights, as fast as they are used up: it
// waits for nothing but room, so that memory is read while blocks wait for each other. All other warps multiply every
// stage together, each its share of the columns, on tensor cores: weights are the operand of eight columns, the rows of
// the step the one of sixteen, half of which is zero.
#pragma once

#include "rope.cuh"
#include "step_words.cuh"

#include "async_copy.cuh"

constexpr u32 WARPS = 8, THREADS = 32 * WARPS;  // that compute; one warp more brings
constexpr u32 COLUMNS = 1024;                    // weights of a row in a stage
constexpr u32 PITCH = 2 * COLUMNS + 64;          // bytes from row to row: two rows are in different banks
constexpr u32 STAGE = 8 * PITCH;
constexpr u32 TILES = 6;                         // tiles that are summed at once; even, since gates and values alternate
constexpr u32 MOST_ROWS = 8, MOST_STAGES = 16;

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init_of(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Among the warps that compute.
DEVICE void sync_computing() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

DEVICE uint4 load_shared16(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}

// d[16 x 8] += a[16 x 16] b[16 x 8].
DEVICE void mma(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

DEVICE u32 pack(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE float low_of(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// The ring, and where in it a warp is.
struct Ring {
  u32 memory, full, empty;  // shared addresses: stages, barriers of stages that are there, and that are used up
  u32 stages;
  u32 stage, parity;

  DEVICE void go_on() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// What is read once need not stay in L2.
DEVICE u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy_bulk_once(u32 shared, const void* global, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// Floats of a vector in a stage.
constexpr u32 FLOATS = 4096;

// Brings a vector. All lanes of one warp.
DEVICE void bring_vector(Ring& ring, const float* from, u32 count) {
  for (u32 first = 0; first < count; first += FLOATS) {
    const u32 bytes = 4 * min(FLOATS, count - first), barrier = ring.full + 8 * ring.stage;
    barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      barrier_expect(barrier, bytes);
      copy_bulk(ring.memory + ring.stage * STAGE, from + first, bytes, barrier);
    }
    __syncwarp();
    ring.go_on();
  }
}

// Brings this block's tiles of a product. All lanes of one warp.
DEVICE void bring(Ring& ring, const bf16* weight, u32 inputs, u32 outputs, u32 matrices) {
  const u32 lane = threadIdx.x % 32, tiles = (outputs + 7) / 8;
  const u64 once = read_once();
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u32 rows = min(8u, outputs - tile * 8);
    for (u32 m = 0; m < matrices; m++) {
      const bf16* from = weight + ((u64)m * outputs + tile * 8 + lane) * inputs;
      for (u32 first = 0; first < inputs; first += COLUMNS) {
        const u32 bytes = 2 * min(COLUMNS, inputs - first), barrier = ring.full + 8 * ring.stage;
        barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, bytes * rows);
        __syncwarp();
        if (lane < rows) copy_bulk_once(ring.memory + ring.stage * STAGE + lane * PITCH, from + first, bytes, barrier, once);
        ring.go_on();
      }
    }
  }
}

// Rows in shared memory, and room for the sums of all warps, twice. Of eight elements of a row the third and fourth lie
// behind the fifth and sixth: the operand of sixteen rows is then what one load brings, its upper half with half of the
// columns and its lower one with the others, which are multiplied with each half of the weights; what the halves give
// with the other's weights is not used, nor are rows that there are not.
struct Bench {
  u32 x, x_pitch;   // shared address and bytes from row to row
  float* sums;      // [2][WARPS][rows][8 TILES]
  u32 turn;
};

DEVICE void put_pair(const Bench& bench, u32 row, u32 column, u32 pair) {
  const u32 place = (column & ~7u) | (column & 2) << 1 | (column & 4) >> 1;
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(bench.x + row * bench.x_pitch + 2 * place), "r"(pair) : "memory");
}

// Multiplies this block's tiles with the rows: put(has one, row, tile of this block, output, sum, sum of the second
// matrix), for an output of each thread of a warp, of which `has one` says whether there is one. All computing threads.
template <u32 MATRICES, class Put>
DEVICE void multiply(Ring& ring, Bench& bench, u32 rows, u32 inputs, u32 outputs, Put put) {
  constexpr u32 PIECES = COLUMNS / 32 / WARPS;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const u32 tiles = (outputs + 7) / 8;
  const u32 x_row = bench.x + min(g, rows - 1) * bench.x_pitch + c * 16 + warp * 64, w_row = ring.memory + g * PITCH + c * 16 + warp * 64;
  // A lane's share of the rows: where a stage has all columns it stays in registers.
  const bool is_short = inputs <= COLUMNS;
  uint4 xs[PIECES];
  auto load_rows = [&](u32 first) {
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
      xs[p] = make_uint4(0, 0, 0, 0);
      if (first + (p * WARPS + warp) * 32 < inputs) xs[p] = load_shared16(x_row + 2 * first + p * WARPS * 64);
    }
  };
  if (is_short) load_rows(0);
  u32 local = 0;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles;) {
    u32 taken = 1;
#pragma unroll
    for (u32 t = 1; t < TILES / MATRICES; t++) taken += tile + t * gridDim.x < tiles;
    float upper[TILES][4] = {}, lower[TILES][4] = {};
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
      if (t >= taken * MATRICES) break;
#pragma unroll 1
      for (u32 first = 0; first < inputs; first += COLUMNS) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const u32 weights = w_row + ring.stage * STAGE;
        uint4 ws[PIECES];
        if (first + COLUMNS <= inputs) {
#pragma unroll
          for (u32 p = 0; p < PIECES; p++) ws[p] = load_shared16(weights + p * WARPS * 64);
        } else {
#pragma unroll
          for (u32 p = 0; p < PIECES; p++) {
            ws[p] = make_uint4(0, 0, 0, 0);
            if (first + (p * WARPS + warp) * 32 < inputs) ws[p] = load_shared16(weights + p * WARPS * 64);
          }
        }
        if (!is_short) load_rows(first);
#pragma unroll
        for (u32 p = 0; p < PIECES; p++) {
          mma(upper[t], xs[p], ws[p].x, ws[p].y);
          mma(lower[t], xs[p], ws[p].z, ws[p].w);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + 8 * ring.stage);
        ring.go_on();
      }
    }
    float* sums = bench.sums + bench.turn * WARPS * rows * 8 * TILES;
    if (g < rows) {
#pragma unroll
      for (u32 t = 0; t < TILES; t++)
        if (t < taken * MATRICES)
          *(float2*)(sums + (warp * rows + g) * 8 * TILES + t * 8 + 2 * c) = make_float2(upper[t][0] + lower[t][2], upper[t][1] + lower[t][3]);
    }
    bench.turn ^= 1;
    sync_computing();
    const u32 width = taken * 8, count = width * rows;
#pragma unroll 1
    for (u32 first = warp * 32; first < count; first += THREADS) {
      const u32 item = first + lane;
      const bool has_one = item < count;
      const u32 row = rows == 1 || !has_one ? 0 : item / width, place = has_one ? item - row * width : 0;
      const float* of = sums + row * 8 * TILES + (MATRICES == 1 ? place : place / 8 * 16 + place % 8);
      float one = 0.0f, two = 0.0f;
#pragma unroll
      for (u32 w = 0; w < WARPS; w++) {
        one += of[w * rows * 8 * TILES];
        if (MATRICES == 2) two += of[w * rows * 8 * TILES + 8];
      }
      put(has_one, row, local + place / 8, (tile + place / 8 * gridDim.x) * 8 + place % 8, one, two);
    }
    tile += taken * gridDim.x, local += taken;
  }
}
