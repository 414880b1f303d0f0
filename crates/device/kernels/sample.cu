// From rows of float32 logits to tokens: the CPU's choice, to the token, from the same logits.
//
// Three kernels, one after the other on a stream: `sample_best`, `sample_sums`, `sample_pick`. What
// makes them agree with the CPU: comparisons are exact; weights are the same sequence of IEEE
// operations; weights of 256 neighbours are summed in float32 in the CPU's 16 lanes; and everything
// beyond is sums of whole numbers, which have no order.
//
// Arguments of all three:
//   model    [rows, vocabulary], model_stride apart: the model's logits, for log-probabilities
//   logits   the same after logits processors, to draw from; may be `model` itself
//   seen     [sets, set_words] bits: the tokens under a row's repetition penalty
//   how      [rows] (see sample.cuh)
//   bests    [rows, 2, chunks] u64 scratch, chunks = ceil(vocabulary / 8192)
//   keys     [rows, blocks] u32 scratch, blocks = ceil(vocabulary / 256)
//   sums     [rows, 2, blocks] u64 scratch
// Nothing need be initialized. Rows that are aligned to 16 bytes are read faster.

#include "overlap.cuh"
#include "sample_pick.cuh"

constexpr u32 CHUNK = 8192;
constexpr u32 NO_TOKEN = 0x7fffffffu;
// Threads of a chunk: a quad for each block.
constexpr u32 CHUNK_THREADS = CHUNK / BLOCK * QUAD;

DEVICE void keep_best(u32& best, u32& token, float x, u32 at) {
  u32 key = key_of(x);
  if (key > best) best = key, token = at;
}

DEVICE u64 max_block_of_chunk(u64 x, u64* room) {
  x = max_warp(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = room[0];
#pragma unroll
  for (u32 i = 1; i < CHUNK_THREADS / 32; i++) x = room[i] > x ? room[i] : x;
  __syncthreads();
  return x;
}

// Finds the best entry of each chunk, of the model's row and of the one to draw from, and the best key
// of each block of the latter. NaN is better than anything.
//
// Grid: (chunks, rows). Block: 128.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) sample_best(
    const float* model, i64 model_stride, const float* logits, i64 logits_stride, u32 vocabulary,
    const u32* seen, u32 set_words, const SampleRow* how, u64* bests, u32* keys, u32 chunks,
    u32 blocks) {
  __shared__ u64 room[CHUNK_THREADS / 32];
  IN_TURN();
  SampleRow own = how[blockIdx.y];
  Logits of_model = logits_of(model, model_stride, vocabulary, nullptr, 0, own);
  of_model.seen = nullptr;
  Logits drawn = logits_of(logits, logits_stride, vocabulary, seen, set_words, own);
  bool is_other = model != logits, differs = is_other || drawn.seen;
  u32 block = blockIdx.x * (CHUNK / BLOCK) + threadIdx.x / QUAD, lane = threadIdx.x % QUAD;
  // KEY_LEAST is beaten by anything that can be drawn.
  u32 best = 0, token = 0, model_best = 0, model_token = 0;
#pragma unroll 4
  for (u32 i = 0; i < BLOCK / 16; i++) {
    u32 at = block * BLOCK + i * 16 + lane * 4;
    if (at >= vocabulary) break;
    float x[4];
    of_model.load4(at, x);
    if (differs) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) keep_best(model_best, model_token, x[j], at + j);
      if (is_other) drawn.load4(at, x);
      drawn.penalise4(at, x);
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++) keep_best(best, token, x[j], at + j);
  }
  u64 entry = entry_of(best, token);
  u64 model_entry = differs ? entry_of(model_best, model_token) : entry;
  u32 of_block = best;
#pragma unroll
  for (u32 step = 1; step < QUAD; step *= 2) {
    u32 other = __shfl_xor_sync(ALL_LANES, of_block, step);
    of_block = other > of_block ? other : of_block;
  }
  if (lane == 0 && block < blocks) keys[(u64)blockIdx.y * blocks + block] = of_block;
  u64* place = bests + (u64)blockIdx.y * 2 * chunks + blockIdx.x;
  entry = max_block_of_chunk(entry, room);
  if (threadIdx.x == 0) place[chunks] = entry;
  model_entry = max_block_of_chunk(model_entry, room);
  if (threadIdx.x == 0) place[0] = model_entry;
}

// The lanes of a quad's four threads, summed: halves added to halves.
DEVICE u64 sum_of_block(float (&lanes)[4]) {
#pragma unroll
  for (u32 step = 2; step > 0; step /= 2) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      lanes[j] = __fadd_rn(lanes[j], __shfl_xor_sync(ALL_LANES, lanes[j], step));
    }
  }
  float sum = __fadd_rn(__fadd_rn(lanes[0], lanes[2]), __fadd_rn(lanes[1], lanes[3]));
  return units_of(sum);
}

// Sums the weights of each block: of the model's row at temperature 1, and, where the row needs it, of
// the one to draw from at the row's.
//
// Grid: (chunks, rows). Block: 128.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) sample_sums(
    const float* model, i64 model_stride, const float* logits, i64 logits_stride, u32 vocabulary,
    const u32* seen, u32 set_words, const SampleRow* how, const u64* bests, u64* sums, u32 chunks,
    u32 blocks) {
  IN_TURN();
  SampleRow own = how[blockIdx.y];
  Logits of_model = logits_of(model, model_stride, vocabulary, nullptr, 0, own);
  of_model.seen = nullptr;
  Logits drawn = logits_of(logits, logits_stride, vocabulary, seen, set_words, own);
  u64 model_entry = max_of(bests + (u64)blockIdx.y * 2 * chunks, chunks);
  u64 entry = max_of(bests + ((u64)blockIdx.y * 2 + 1) * chunks, chunks);
  if (is_bad(model_entry) || is_bad(entry)) return;
  float model_best = of_key((u32)(model_entry >> 32)), best = of_key((u32)(entry >> 32));
  bool is_other = model != logits;
  bool is_same = !is_other && !drawn.seen && own.temperature == 1.0f;
  bool is_summed = needs_sums(own) && !is_same;
  float scale = scale_of(own.temperature);
  u32 block = blockIdx.x * (CHUNK / BLOCK) + threadIdx.x / QUAD, lane = threadIdx.x % QUAD;
  float model_lanes[4] = {}, lanes[4] = {};
#pragma unroll 2
  for (u32 i = 0; i < BLOCK / 16; i++) {
    u32 at = block * BLOCK + i * 16 + lane * 4;
    if (at >= vocabulary) break;
    float x[4];
    of_model.load4(at, x);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      model_lanes[j] = __fadd_rn(model_lanes[j], exp_rounded(__fsub_rn(x[j], model_best)));
    }
    if (!is_summed) continue;
    if (is_other) drawn.load4(at, x);
    drawn.penalise4(at, x);
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      lanes[j] = __fadd_rn(lanes[j], weight_of(x[j], best, scale));
    }
  }
  u64 model_sum = sum_of_block(model_lanes);
  u64 sum = is_summed ? sum_of_block(lanes) : model_sum;
  if (lane != 0 || block >= blocks) return;
  u64* place = sums + (u64)blockIdx.y * 2 * blocks + block;
  place[0] = model_sum;
  place[blocks] = sum;
}

// Picks a token for each row. out [rows]; tokens [rows] or null: the tokens by themselves, for the kernels
// behind, NO_TOKEN for a bad row.
//
// Grid: (1, rows). Block: 1024.
extern "C" __global__ void __launch_bounds__(PICK_THREADS) sample_pick(
    const float* model, i64 model_stride, const float* logits, i64 logits_stride, u32 vocabulary,
    const u32* seen, u32 set_words, const SampleRow* how, const u64* bests, const u32* keys,
    u64* sums, u32 chunks, u32 blocks, Sampled* out, u32* tokens) {
  __shared__ Desk desk;
  IN_TURN();
  SampleRow own = how[blockIdx.y];
  Logits drawn = logits_of(logits, logits_stride, vocabulary, seen, set_words, own);
  u64 model_entry = max_of(bests + (u64)blockIdx.y * 2 * chunks, chunks);
  u64 entry = max_of(bests + ((u64)blockIdx.y * 2 + 1) * chunks, chunks);
  if (is_bad(model_entry) || is_bad(entry)) {
    if (threadIdx.x == 0) {
      out[blockIdx.y] = {0, BAD_LOGITS, 0.0f};
      if (tokens) tokens[blockIdx.y] = NO_TOKEN;
    }
    return;
  }
  u64* model_sums = sums + (u64)blockIdx.y * 2 * blocks;
  u64 model_total = total_of(model_sums, blocks, desk);
  u32 token = token_of(entry);
  if (own.temperature > 0.0f && own.top_k != 1) {
    u32 best_key = (u32)(entry >> 32);
    u64* drawn_sums = model_sums + blocks;
    Entries entries = {drawn, of_key(best_key), scale_of(own.temperature),
                       keys + (u64)blockIdx.y * blocks, blocks, 0, -1.0, 0.0f, 0};
    u64 bits = random_bits(own);
    if (own.top_k > 0 || own.top_p < 1.0f || own.min_p > 0.0f) {
      u64 total = needs_sums(own) ? total_of(drawn_sums, blocks, desk) : 0;
      token = draw_from_some(entries, own, total, bits, best_key, drawn_sums, desk);
    } else {
      token = draw(entries, drawn_sums, bits, desk);
    }
  }
  if (threadIdx.x == 0) {
    double above_best = (double)model[blockIdx.y * model_stride + token] -
                        (double)of_key((u32)(model_entry >> 32));
    double log_sum = log(__ddiv_rn((double)model_total, UNITS));
    out[blockIdx.y] = {token, 0, (float)(above_best - log_sum)};
    if (tokens) tokens[blockIdx.y] = token;
  }
}
