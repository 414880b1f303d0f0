// The entries of a row that may be drawn, looked at by one block of threads: which there are, and where a
// count or a sum of their weights, best first, reaches some number.
//
// Nothing is sorted. The entry at which a count or a sum of weights is reached is found by histograms
// that narrow down on it; their sums are whole numbers, so that atomics may add in any order.
#pragma once

#include "sample.cuh"

constexpr u32 PICK_THREADS = 1024;
constexpr u32 BINS = 2 * PICK_THREADS;
// Entries that are kept at hand; of rows that have more, all are looked at each time.
constexpr u32 LIST = 3840;
// Entries that are compared each with each.
constexpr u32 FEW = 256;
constexpr u32 NOT_FOUND = 0xffffffffu;

// Shared memory of `sample_pick`.
struct Desk {
  u64 list[LIST];
  // Of each bin: low and high half of a sum.
  u32 low[BINS], high[BINS];
  u64 warps[32];
  u32 listed, found;
  u64 before;
};

// The sum up to and with this thread; `total` is that of all.
DEVICE u64 scan_all(u64 x, Desk& desk, u64& total) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u64 other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += other;
  }
  if (lane == 31) desk.warps[warp] = x;
  __syncthreads();
  if (warp == 0) {
    u64 sum = desk.warps[lane];
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      u64 other = __shfl_up_sync(ALL_LANES, sum, step);
      if (lane >= step) sum += other;
    }
    desk.warps[lane] = sum;
  }
  __syncthreads();
  u64 before = warp > 0 ? desk.warps[warp - 1] : 0;
  total = desk.warps[31];
  __syncthreads();
  return before + x;
}

DEVICE u64 sum_all(u64 x, Desk& desk) {
  u64 total;
  scan_all(x, desk, total);
  return total;
}

// The sum of `count` numbers.
DEVICE u64 total_of(const u64* from, u32 count, Desk& desk) {
  u64 sum = 0;
  for (u32 i = threadIdx.x; i < count; i += PICK_THREADS) sum += from[i];
  return sum_all(sum, desk);
}

// The entries of a row that may still be drawn.
struct Entries {
  Logits row;
  float best, scale;
  // The best key of each block.
  const u32* keys;
  u32 blocks;
  // Entries below are out.
  u64 cut;
  // So are weights that are not above `rest`, or are below `min_weight`.
  double rest;
  float min_weight;
  // How many are at hand; beyond LIST none are, and the whole row is looked at.
  u32 listed;

  DEVICE float weight(u64 entry) const {
    return weight_of(of_key((u32)(entry >> 32)), best, scale);
  }
  DEVICE bool has(u64 entry, float weight) const {
    return entry >= cut && (double)weight > rest && weight >= min_weight;
  }

  // Calls `f` with the entries of a block from the cut on, on some thread of the warp.
  template <class F>
  DEVICE void look_at(u32 block, F f) const {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      u32 at = block * BLOCK + i * 128 + threadIdx.x % 32 * 4;
      if (at >= row.count) continue;
      float x[4];
      row.load4(at, x);
      row.penalise4(at, x);
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        u64 entry = entry_of(key_of(x[j]), at + j);
        if (entry >= cut) f(entry);
      }
    }
  }

  // Calls `f` with all entries of the row from the cut on, a warp for each block that has some.
  template <class F>
  DEVICE void look(F f) const {
    u32 low = (u32)(cut >> 32);
    for (u32 block = threadIdx.x / 32; block < blocks; block += PICK_THREADS / 32) {
      if (keys[block] >= low) look_at(block, f);
    }
  }

  // Calls `f(entry, weight)` with every entry that may be drawn, on some thread.
  template <class F>
  DEVICE void each(const Desk& desk, F f) const {
    auto one = [&](u64 entry) {
      float w = weight(entry);
      if (has(entry, w)) f(entry, w);
    };
    if (listed <= LIST) {
      for (u32 i = threadIdx.x; i < listed; i += PICK_THREADS) one(desk.list[i]);
    } else {
      look(one);
    }
  }

  // Lists the entries that may be drawn.
  DEVICE void gather(Desk& desk) {
    if (threadIdx.x == 0) desk.listed = 0;
    __syncthreads();
    look([&](u64 entry) {
      if (!has(entry, weight(entry))) return;
      u32 at = atomicAdd(&desk.listed, 1u);
      if (at < LIST) desk.list[at] = entry;
    });
    __syncthreads();
    listed = desk.listed;
    __syncthreads();
  }
};

// Of what to add up, and along which half of an entry, greatest first.
struct Along {
  bool by_token, by_weight;
  // Only entries with this key, or 0 for all.
  u32 only;
};

// The greatest half h such that entries of halves from h on add up to `wanted`; `above` gets the sum
// of those past it. NOT_FOUND where all do not reach it. [low, high] has all halves.
//
// A histogram of the range finds a bin, which becomes the range. With ONCE, the bin's lowest half is the
// answer.
template <bool ONCE>
DEVICE u32 reach(const Entries& entries, Along along, u64 wanted, u32 low, u32 high, u64& above,
                 Desk& desk) {
  above = 0;
  while (true) {
    u32 span = high - low, bits = 32 - __clz(span), shift = bits > 11 ? bits - 11 : 0;
    for (u32 i = threadIdx.x; i < BINS; i += PICK_THREADS) desk.low[i] = desk.high[i] = 0;
    if (threadIdx.x == 0) desk.found = NOT_FOUND;
    __syncthreads();
    entries.each(desk, [&](u64 entry, float weight) {
      u32 key = (u32)(entry >> 32), half = along.by_token ? (u32)entry : key;
      if (half < low || half > high || (along.only && key != along.only)) return;
      u64 value = along.by_weight ? units_of(weight) : 1;
      u32 bin = half - low >> shift, part = (u32)value, rest = (u32)(value >> 32);
      u32 old = atomicAdd(&desk.low[bin], part);
      rest += old + part < old;
      if (rest) atomicAdd(&desk.high[bin], rest);
    });
    __syncthreads();
    // Bins from the greatest on, two to a thread.
    u32 bin = BINS - 1 - 2 * threadIdx.x;
    u64 first = (u64)desk.high[bin] << 32 | desk.low[bin];
    u64 second = (u64)desk.high[bin - 1] << 32 | desk.low[bin - 1];
    u64 total, with = above + scan_all(first + second, desk, total);
    u64 before = with - first - second;
    if (before < wanted && before + first >= wanted) {
      desk.found = bin, desk.before = before;
    } else if (before + first < wanted && with >= wanted) {
      desk.found = bin - 1, desk.before = before + first;
    }
    __syncthreads();
    u32 found = desk.found;
    above = found == NOT_FOUND ? above : desk.before;
    __syncthreads();
    if (found == NOT_FOUND) return NOT_FOUND;
    low += found << shift;
    if (ONCE || shift == 0) return low;
    u32 left = high - low, width = (1u << shift) - 1;
    high = low + (width < left ? width : left);
  }
}

// Cuts off entries that are surely not among the best that add up to `wanted`, and lists the others.
DEVICE void narrow(Entries& entries, bool by_weight, u64 wanted, u32 low, u32 high, Desk& desk) {
  u64 above;
  u32 key = reach<true>(entries, {false, by_weight, 0}, wanted, low, high, above, desk);
  u64 cut = key == NOT_FOUND ? 0 : (u64)key << 32;
  entries.cut = cut > entries.cut ? cut : entries.cut;
  entries.gather(desk);
}
