// decode_step: products of up to eight rows with weights that a warp of their own brings ahead.
//
// A block has every gridDim.x-th tile of eight outputs. The bringing warp goes through the tiles of all products of all
// layers in order and fills a ring of stages, each eight rows of up to COLUMNS weights, as fast as they are used up: it
// waits for nothing but room, so that memory is read while blocks wait for each other. All other warps multiply every
// stage together, each its share of the columns, on tensor cores.
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
DEVICE bool barrier_is_past(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All lanes of a warp, of which one looks.
DEVICE void barrier_wait_warp(u32 barrier, u32 parity) {
  if (threadIdx.x % 32 == 0) barrier_wait(barrier, parity);
  __syncwarp();
}

// As the warp that brings waits for room: not often, since who computes shares its part of the processor.
DEVICE void wait_for_room(u32 barrier, u32 parity) {
  if (threadIdx.x % 32 == 0) {
    while (!barrier_is_past(barrier, parity)) __nanosleep(200);
  }
  __syncwarp();
}

// Among the warps that compute.
DEVICE void sync_computing() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

DEVICE uint4 load_shared16(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}

DEVICE void store_shared(u32 address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory"); }

DEVICE void load_shared(u32 address, u32 (&x)[2]) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}
DEVICE void load_shared(u32 address, u32 (&x)[4]) {
  const uint4 y = load_shared16(address);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
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

  // Waits for the next `count` stages, at most as many as there are, each of which a lane looks after; answers which one
  // this lane's is. All lanes of a computing warp.
  DEVICE u32 wait_for(u32 count) const {
    const u32 lane = threadIdx.x % 32;
    u32 mine = stage + lane;
    const bool is_behind = mine >= stages;
    if (is_behind) mine -= stages;
    if (lane < count) barrier_wait(full + 8 * mine, parity ^ is_behind);
    __syncwarp();
    return mine;
  }
  // Gives them back.
  DEVICE void release(u32 count, u32 mine) const {
    __syncwarp();
    if (threadIdx.x % 32 < count) barrier_arrive(empty + 8 * mine);
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
    wait_for_room(ring.empty + 8 * ring.stage, ring.parity ^ 1);
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
        wait_for_room(ring.empty + 8 * ring.stage, ring.parity ^ 1);
        if (lane == 0) barrier_expect(barrier, bytes * rows);
        __syncwarp();
        if (lane < rows) copy_bulk_once(ring.memory + ring.stage * STAGE + lane * PITCH, from + first, bytes, barrier, once);
        ring.go_on();
      }
    }
  }
}

// Rows in shared memory, and room for the sums of all warps, twice. Of eight elements of a row the third and fourth lie
// behind the fifth and sixth: the first four are then of one slice of the inputs, the last four of the other.
struct Bench {
  u32 x, x_pitch;   // shared address and bytes from row to row
  float* sums;      // [2][WARPS][rows][8 TILES]
  u32 turn;
};

DEVICE void put_pair(const Bench& bench, u32 row, u32 column, u32 pair) {
  const u32 place = (column & ~7u) | (column & 2) << 1 | (column & 4) >> 1;
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(bench.x + row * bench.x_pitch + 2 * place), "r"(pair) : "memory");
}

// A product as one warp has it.
//
// Weights are the operand of sixteen rows: what one load of a lane brings is eight outputs' weights of two slices of the
// inputs. Of up to four rows the operand of eight columns has the first slice in four columns and the second in the
// others, so that one product does for both; of more rows, a product takes one slice, and half of what it gives is not
// used. IS_SHORT: the inputs are at most COLUMNS, and a lane's share of the rows stays in registers.
template <u32 MOST, bool IS_SHORT>
struct Product {
  static constexpr u32 PIECES = COLUMNS / 32 / WARPS, X_WORDS = MOST <= 4 ? 2 : 4;
  static constexpr bool FEW = MOST <= 4;
  static constexpr u32 AT_ONCE = FEW ? IS_SHORT ? 4 : 2 : 2;

  u32 lane, warp, rows, inputs;
  u32 x_row, w_row;  // shared addresses
  u32 to;            // where sums of the next tile go
  u32 kept[PIECES][X_WORDS];
  float d[2][4];     // of the tile with several stages

  DEVICE Product(const Ring& ring, const Bench& bench, u32 rows_, u32 inputs_) : rows(rows_), inputs(inputs_) {
    const u32 thread = thread_anew(), g = thread % 32 / 4, c = thread % 4;
    lane = thread % 32, warp = thread / 32;
    x_row = bench.x + min(FEW ? g % 4 : g, rows - 1) * bench.x_pitch + c * 16 + (FEW ? g / 4 * 8 : 0);
    w_row = ring.memory + g * PITCH + c * 16;
    if (IS_SHORT) load_rows(kept, 0);
    clear(d);
  }
  DEVICE static void clear(float (&d)[2][4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) d[0][i] = d[1][i] = 0.0f;
  }
  DEVICE bool is_there(u32 first, u32 p) const { return first + (p * WARPS + warp) * 32 < inputs; }
  // Of a piece that there is not, another's weights are multiplied with zeros.
  DEVICE void load_rows(u32 (&x)[PIECES][X_WORDS], u32 first) const {
#pragma unroll
    for (u32 p = 0; p < PIECES; p++) {
      const bool there = is_there(first, p);
      load_shared(x_row + (there ? 2 * first + (p * WARPS + warp) * 64 : 0), x[p]);
#pragma unroll
      for (u32 i = 0; i < X_WORDS; i++) x[p][i] = there ? x[p][i] : 0;
    }
  }
  DEVICE void begin_sums(float* sums) {
    const u32 row = MOST == 1 ? 0 : 2 * (FEW ? lane % 2 : lane % 4);
    to = shared_address(sums) + 4 * ((warp * rows + row) * 8 * TILES + lane / 4);
  }
  DEVICE void put_sums(const float (&of)[2][4]) {
    const u32 c = lane % 4, row = MOST == 1 ? 0 : 2 * (FEW ? c % 2 : c);
    // What is of one slice with the columns of the other is not used.
    float even = FEW ? (c < 2 ? of[0][0] + of[1][0] : of[0][2] + of[1][2]) : of[0][0] + of[1][2];
    float odd = FEW ? (c < 2 ? of[0][1] + of[1][1] : of[0][3] + of[1][3]) : of[0][1] + of[1][3];
    if (FEW) even += __shfl_xor_sync(ALL_LANES, even, 2);
    if (FEW && MOST > 1) odd += __shfl_xor_sync(ALL_LANES, odd, 2);
    const bool is_one = MOST == 1 ? c == 0 : !FEW || c < 2;
    if (is_one && row < rows) store_shared(to, even);
    if (MOST > 1 && is_one && row + 1 < rows) store_shared(to + 4 * 8 * TILES, odd);
    to += 32;
  }
  // Multiplies N stages, in straight line: all loads are on their way before the first product, and no register is defined
  // in one branch and used in another, which would keep it all through a layer.
  template <u32 N, class Meanwhile>
  DEVICE void multiply(Ring& ring, u32 chunk, Meanwhile meanwhile) {
    const u32 mine = ring.wait_for(N);
    uint4 w[N][PIECES];
    u32 x[IS_SHORT ? 1 : N][PIECES][X_WORDS];
#pragma unroll
    for (u32 s = 0; s < N; s++) {
      const u32 first = IS_SHORT ? 0 : (chunk + s) * COLUMNS, weights = w_row + ring.stage * STAGE;
#pragma unroll
      for (u32 p = 0; p < PIECES; p++) w[s][p] = load_shared16(weights + (is_there(first, p) ? (p * WARPS + warp) * 64 : 0));
      if (!IS_SHORT) load_rows(x[IS_SHORT ? 0 : s], first);
      ring.go_on();
    }
    meanwhile();
    float own[IS_SHORT ? N : 1][2][4];
#pragma unroll
    for (u32 s = 0; s < N; s++) {
      float(&sum)[2][4] = IS_SHORT ? own[IS_SHORT ? s : 0] : d;
      if (IS_SHORT) clear(sum);
#pragma unroll
      for (u32 p = 0; p < PIECES; p++) {
        const u32(&of)[X_WORDS] = IS_SHORT ? kept[p] : x[IS_SHORT ? 0 : s][p];
        mma(sum[FEW ? p % 2 : 0], w[s][p], of[0], of[1]);
        if (!FEW) mma(sum[1], w[s][p], of[X_WORDS - 2], of[X_WORDS - 1]);
      }
    }
    ring.release(N, mine);
    if (IS_SHORT) {
#pragma unroll
      for (u32 s = 0; s < N; s++) put_sums(own[IS_SHORT ? s : 0]);
    }
  }
};

// Multiplies this block's tiles with the rows: put(has one, row, tile of this block, output, sum, sum of the second
// matrix), for an output of each thread of a warp, of which `has one` says whether there is one. All computing threads.
// `meanwhile` is called at the first stages, while loads are on their way.
template <u32 MOST, bool IS_SHORT, u32 MATRICES, class Put, class Meanwhile>
DEVICE void multiply(Ring& ring, Bench& bench, u32 rows, u32 inputs, u32 outputs, Put put, Meanwhile meanwhile) {
  using P = Product<MOST, IS_SHORT>;
  const u32 tiles = (outputs + 7) / 8, chunks = IS_SHORT ? 1 : (inputs + COLUMNS - 1) / COLUMNS;
  P product(ring, bench, rows, inputs);
  const u32 lane = product.lane, warp = product.warp;
  u32 local = 0;
#pragma unroll 1
  for (u32 tile = blockIdx.x; tile < tiles;) {
    u32 taken = 1;
#pragma unroll
    for (u32 t = 1; t < TILES / MATRICES; t++) taken += tile + t * gridDim.x < tiles;
    float* const sums = bench.sums + bench.turn * WARPS * rows * 8 * TILES;
    product.begin_sums(sums);
    u32 left = taken * MATRICES;
    auto first_time = [&] {
      if (local == 0 && left == taken * MATRICES) meanwhile();
    };
#pragma unroll 1
    while (left > 0) {
      if (!IS_SHORT) {
        u32 chunk = 0;
#pragma unroll 1
        for (; chunk + 2 <= chunks; chunk += 2) product.template multiply<2>(ring, chunk, [] {});
        if (chunk < chunks) product.template multiply<1>(ring, chunk, first_time);
        product.put_sums(product.d);
        P::clear(product.d);
        left--;
      } else if (P::AT_ONCE >= 4 && left >= 4) {
        product.template multiply<P::AT_ONCE>(ring, 0, first_time);
        left -= 4;
      } else if (left >= 2) {
        product.template multiply<2>(ring, 0, first_time);
        left -= 2;
      } else {
        product.template multiply<1>(ring, 0, first_time);
        left--;
      }
    }
    bench.turn ^= 1;
    sync_computing();
    const u32 width = taken * 8, count = width * rows;
#pragma unroll 1
    for (u32 item_of_warp = warp * 32; item_of_warp < count; item_of_warp += THREADS) {
      const u32 item = item_of_warp + lane;
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
