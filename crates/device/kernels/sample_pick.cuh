// The choice of a token by one block of threads, among the entries that top-k, top-p and min-p leave.
#pragma once

#include "sample_entries.cuh"

// Cuts off all but the fewest of the best entries that add up to `wanted`.
DEVICE void keep(Entries& entries, bool by_weight, u64 wanted, u32 low, u32 high, Desk& desk) {
  u64 above;
  u32 key = reach<false>(entries, {false, by_weight, 0}, wanted, low, high, above, desk);
  if (key == NOT_FOUND) return;
  u64 first = (u64)key << 32, cut = first > entries.cut ? first : entries.cut;
  // How many of those with this key are needed, the smallest ids of them.
  u64 each = by_weight ? units_of(entries.weight(first)) : 1;
  u64 needed = (wanted - above + each - 1) / each, mine = 0;
  entries.each(desk, [&](u64 entry, float) { mine += (u32)(entry >> 32) == key; });
  if (sum_all(mine, desk) > needed) {
    u64 unused;
    u32 last = ~(entries.row.count - 1);
    cut = first | reach<false>(entries, {true, false, key}, needed, last, ~0u, unused, desk);
  }
  entries.cut = cut;
}

// Sums the weights of the entries left, block by block.
DEVICE void sum_blocks(const Entries& entries, u64* sums) {
  u32 low = (u32)(entries.cut >> 32);
  for (u32 block = threadIdx.x / 32; block < entries.blocks; block += PICK_THREADS / 32) {
    u64 sum = 0;
    if (entries.keys[block] >= low) {
      entries.look_at(block, [&](u64 entry) {
        float w = entries.weight(entry);
        sum += entries.has(entry, w) ? units_of(w) : 0;
      });
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    }
    if (threadIdx.x % 32 == 0) sums[block] = sum;
  }
}

// Finds the block in which the running sum passes the share of the total that `bits` ask for, then the
// token.
DEVICE u32 draw(const Entries& entries, const u64* sums, u64 bits, Desk& desk) {
  u64 target = share_of_total(bits, total_of(sums, entries.blocks, desk));
  u64 running = 0;
  for (u32 first = 0; first < entries.blocks; first += PICK_THREADS) {
    u32 block = first + threadIdx.x;
    u64 own = block < entries.blocks ? sums[block] : 0, total;
    u64 with = running + scan_all(own, desk, total);
    if (with > target && with - own <= target) {
      desk.found = block;
      desk.before = with - own;
    }
    running += total;
  }
  __syncthreads();
  u32 token = desk.found * BLOCK + threadIdx.x;
  u64 before = desk.before;
  float weight = 0.0f;
  if (threadIdx.x < BLOCK && token < entries.row.count) {
    u64 entry = entry_of(key_of(entries.row.at(token)), token);
    float own = entries.weight(entry);
    weight = entries.has(entry, own) ? own : 0.0f;
  }
  __syncthreads();
  // Where rounding leaves the target at the end of the block: its last possible token.
  if (threadIdx.x == 0) desk.found = 0, desk.listed = NOT_FOUND;
  u64 own = units_of(weight), total;
  u64 with = before + scan_all(own, desk, total);
  if (weight > 0.0f) atomicMax(&desk.found, token);
  if (with > target && with - own <= target) desk.listed = token;
  __syncthreads();
  return desk.listed == NOT_FOUND ? desk.found : desk.listed;
}

// The part of `whole` that top-p wants.
DEVICE u64 wanted_of(u64 whole, float top_p) {
  return (u64)ceil(__dmul_rn((double)top_p, (double)whole));
}

// Draws from few entries, all of them listed: each thread compares its own with all others, which takes
// fewer barriers than histograms. `whole` is what top-p takes its part of, without top-k.
DEVICE u32 draw_from_few(const Entries& entries, const SampleRow& how, u64 whole, u64 bits,
                         Desk& desk) {
  u64* units = (u64*)desk.low;
  u32 count = entries.listed;
  bool is_kept = threadIdx.x < count;
  u64 entry = is_kept ? desk.list[threadIdx.x] : 0;
  float weight = is_kept ? entries.weight(entry) : 0.0f;
  u64 own = units_of(weight);
  if (is_kept) units[threadIdx.x] = own;
  __syncthreads();
  u32 rank = 0;
  u64 better = 0;
  if (is_kept) {
    for (u32 i = 0; i < count; i++) {
      bool is_better = desk.list[i] > entry;
      rank += is_better;
      better += is_better ? units[i] : 0;
    }
  }
  if (how.top_k > 0) is_kept = is_kept && rank < how.top_k;
  if (how.top_p < 1.0f) {
    if (how.top_k > 0) whole = sum_all(is_kept ? own : 0, desk);
    is_kept = is_kept && better < wanted_of(whole, how.top_p);
  }
  is_kept = is_kept && weight >= how.min_p;
  u64 target = share_of_total(bits, sum_all(is_kept ? own : 0, desk));
  if (threadIdx.x < count) units[threadIdx.x] = is_kept ? own : 0;
  __syncthreads();
  if (is_kept) {
    // Smaller ids have greater halves.
    u64 before = 0;
    for (u32 i = 0; i < count; i++) before += (u32)desk.list[i] > (u32)entry ? units[i] : 0;
    if (before <= target && before + own > target) desk.found = token_of(entry);
  }
  __syncthreads();
  return desk.found;
}

// Draws from the entries that top-k, top-p and min-p leave. `total` is the sum of the row's weights, where it
// is needed; `sums` is scratch memory, one for each block.
DEVICE u32 draw_from_some(Entries& entries, const SampleRow& how, u64 total, u64 bits, u32 best_key,
                          u64* sums, Desk& desk) {
  bool has_k = how.top_k > 0, has_p = how.top_p < 1.0f;
  u32 low = KEY_LEAST + 1;
  if (!has_k) {
    double weight = (double)how.min_p;
    if (has_p) {
      double share = __ddiv_rn((double)total, UNITS);
      // All tokens up to this weight together are no more than what top-p leaves out.
      weight = __ddiv_rn(__dmul_rn(1.0 - (double)how.top_p, share), (double)entries.row.count);
      entries.rest = weight;
    } else {
      entries.min_weight = how.min_p;
    }
    // A logit safely below those of this weight, so that few need to be looked at.
    double slack = (double)how.temperature * 1e-3 + fabs((double)entries.best) * 1e-6 + 1e-37;
    double bound = (double)entries.best + (double)how.temperature * log(weight) - slack;
    u32 key = key_of((float)bound);
    low = key > low ? key : low;
  } else if (how.top_k <= entries.blocks && entries.blocks <= LIST) {
    // As many blocks have an entry from here on.
    for (u32 i = threadIdx.x; i < entries.blocks; i += PICK_THREADS) {
      desk.list[i] = entry_of(entries.keys[i], i);
    }
    __syncthreads();
    entries.listed = entries.blocks;
    u64 unused;
    u32 key = reach<false>(entries, {false, false, 0}, how.top_k, low, best_key, unused, desk);
    low = key == NOT_FOUND ? low : key;
  }
  entries.cut = (u64)low << 32;
  entries.listed = LIST + 1;
  if (has_k) entries.gather(desk);
  if (entries.listed > LIST && (has_k || has_p)) {
    u64 wanted = has_k ? how.top_k : wanted_of(total, how.top_p);
    narrow(entries, !has_k, wanted, low, best_key, desk);
  }
  if (entries.listed <= FEW) return draw_from_few(entries, how, total, bits, desk);

  for (u32 stage = 0; stage < 2; stage++) {
    bool by_weight = stage == 1;
    if (by_weight ? !has_p : !has_k) continue;
    u64 wanted = how.top_k;
    if (by_weight) {
      u64 whole = total;
      if (has_k) {
        u64 mine = 0;
        entries.each(desk, [&](u64, float w) { mine += units_of(w); });
        whole = sum_all(mine, desk);
      }
      wanted = wanted_of(whole, how.top_p);
    }
    keep(entries, by_weight, wanted, low, best_key, desk);
  }
  entries.min_weight = how.min_p;
  sum_blocks(entries, sums);
  __syncthreads();
  return draw(entries, sums, bits, desk);
}
