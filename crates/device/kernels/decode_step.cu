// A decode step of up to eight requests, from token ids to logits, in one launch: what a small model's step costs is
// less the reading of its weights than the waiting of kernels for each other.
//
// One block a processor, all of them running at once (a cooperative launch). Weights stream through a ring in each
// block's shared memory, across products and layers (step_products.cuh); what one block computes and others need goes by
// words that say their round (step_words.cuh). A layer is five such rounds: queries, keys and values; attention; its
// product; the gate; the product behind it. The residual stream of an output stays with the block that has its tile.
//
// -D HEAD_DIM, -D GROUP (step_attention.cuh), -D NARROW=1 where hidden is at most 1024, else 0. sm_90. Grid: at most one block a processor and at most ffn / 8.
// Block: 288 threads. Dynamic shared memory: `shared` of decode_step.rs. hidden, the width of all query heads and
// ffn are multiples of 32, pointers 16-byte aligned.
//
// Columns and table come from a plan. Whatever they hold, nothing outside of the cache and the columns is read or
// written: a page that there is not is read as the last one and not written, a stream is cut to its seat's entries.

#if __CUDA_ARCH__ != 900  // before, no copy engine fills the ring; later, it was not measured: nothing asks for the kernels
extern "C" __global__ void decode_step_1() {}
extern "C" __global__ void decode_step_4() {}
extern "C" __global__ void decode_step_8() {}
#else

#include "step_attention.cuh"

struct LayerWeights {
  const float* attn_norm;
  const bf16* qkv;        // [q + 2 kv, hidden]
  const float* qkv_bias;  // or null
  const float *q_norm, *k_norm;  // [HEAD_DIM] or null
  const bf16* o;          // [hidden, q]
  const float* ffn_norm;
  const bf16* gate_up;    // [2 ffn, hidden]
  const bf16* down;       // [hidden, ffn]
};

// Rust: #[repr(C)], the same order; 8-byte fields first.
struct StepArgs {
  const LayerWeights* weights;  // [layers]
  const bf16* embed;            // [vocab, hidden]
  const float* norm;            // before the output matrix
  const bf16* head;             // [vocab, hidden]
  float* logits;                // [rows, vocab]
  const u32* ids;               // [rows]; from 2^31 on, which of `sampled`
  const u32* sampled;           // [samples]
  bf16* keys;                   // of layer 0
  const u32 *seat, *len, *page, *slot, *position;  // [rows]; len includes this step's token, which goes to slot of page
  const u32* table;             // [seats, table_stride]
  const u64* phases;            // [HEAD_DIM / 2], as in rope.cuh
  u64* words;                   // see Words
  u32* step;                    // number of this launch, below 2^20; zeroed with the words
  i64 layer_stride, page_stride, kv_stride, head_stride, slot_stride;  // elements
  u32 rows, layers, hidden, kv_heads, ffn, vocab, samples, pages, page_size, table_stride, seats, window, stages, is_gelu;
  float eps, scale, embed_scale;
};

// Where words of each kind begin, by the largest number of rows, so that a word is always of one row and column.
struct Words {
  u64 *after_o, *after_down, *qkv, *attended, *gated, *parts;

  DEVICE Words(const StepArgs& a, u32 q, u32 kv) {
    after_o = a.words;
    after_down = after_o + MOST_ROWS * a.hidden / 2;
    qkv = after_down + MOST_ROWS * a.hidden / 2;
    attended = qkv + MOST_ROWS * (q + 2 * kv) / 2;
    gated = attended + MOST_ROWS * q / 2;
    parts = gated + MOST_ROWS * a.ffn / 2;  // [tasks][GROUP][PART], tasks being at most the grid, or the rows' heads
  }
};

struct Shared {
  u64 full[MOST_STAGES], empty[MOST_STAGES];
  float squares[MOST_ROWS][WARPS], share;  // of a column in the mean
  u32 len[MOST_ROWS], seat[MOST_ROWS], page[MOST_ROWS], slot[MOST_ROWS];
};


// Whether a stage has all columns of products of the residual stream.
constexpr bool IS_SHORT = NARROW;

template <u32 MOST>
DEVICE u32 rows_of(const StepArgs& a) {
  return MOST == 1 ? 1 : a.rows;
}

DEVICE u32 token_of(const StepArgs& a, u32 row) {
  const u32 id = a.ids[row], sample = id & 0x7fffffffu;
  return id != sample && sample < a.samples ? a.sampled[sample] : id;
}

// What a row is to be divided by after its sums of squares are in `shared`.
DEVICE float factor_of(const StepArgs& a, const Shared& shared, u32 row) {
  float sum = 0.0f;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) sum += shared.squares[row][w];
  return rsqrtf(sum * shared.share + a.eps);
}

// Leaves the sums of squares in shared memory, of a warp each.
template <u32 MOST>
DEVICE void share_squares(const float (&square)[MOST], u32 rows, Shared& shared) {
#pragma unroll
  for (u32 r = 0; r < MOST; r++) {
    if (r >= rows) break;
    const float sum = sum_lanes(square[r], 32);
    if (threadIdx.x % 32 == 0) shared.squares[r][threadIdx.x / 32] = sum;
  }
}

// The residual stream times the weight of a norm, as rows to multiply, and this thread's part of the sums of squares.
// From the embedding where `words` is null.
template <u32 MOST>
DEVICE void stage_normed(const StepArgs& a, Ring& ring, const Bench& bench, Shared& shared, float (&square)[MOST], const u64* words, u32 round) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (u32 r = 0; r < MOST; r++) square[r] = 0.0f;
  const u32 rows = rows_of<MOST>(a);
  // Four columns.
  auto use = [&](u32 row, u32 column, u32 first, u32 second, float4 w) {
    const float x = low_of(first), y = high_of(first), z = low_of(second), u = high_of(second);
#pragma unroll
    for (u32 r = 0; r < MOST; r++)
      if (MOST == 1 || r == row) square[r] = __fmaf_rn(u, u, __fmaf_rn(z, z, __fmaf_rn(y, y, __fmaf_rn(x, x, square[r]))));
    put_pair(bench, row, column, pack(x * w.x, y * w.y));
    put_pair(bench, row, column + 2, pack(z * w.z, u * w.w));
  };
  // The weight is what the ring has next.
  const Ring from = ring;
  for (u32 first = 0; first < a.hidden; first += FLOATS, ring.go_on()) barrier_wait_warp(ring.full + 8 * ring.stage, ring.parity);
  auto weight = [&](u32 column) {
    const u32 stage = from.stage + column / FLOATS, at = from.memory + (stage < from.stages ? stage : stage - from.stages) * STAGE;
    float4 w;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(w.x), "=f"(w.y), "=f"(w.z), "=f"(w.w) : "r"(at + column % FLOATS * 4) : "memory");
    return w;
  };
  if (words) {
    receive_rows<2>(words, rows, a.hidden / 2, round, THREADS, [&](u32 word) { return weight(2 * word); },
                 [&](u32 row, u32 word, u32 x, u32 y, float4 w) { use(row, 2 * word, x, y, w); });
  } else {
    for (u32 row = 0; row < rows; row++) {
      const u32 id = token_of(a, row);
      for (u32 column = 4 * threadIdx.x; column < a.hidden; column += 4 * THREADS) {
        const uint2 pairs = id < a.vocab ? *(const uint2*)(a.embed + (u64)id * a.hidden + column) : make_uint2(0, 0);
        auto scaled = [&](u32 pair) { return pack(low_of(pair) * a.embed_scale, high_of(pair) * a.embed_scale); };
        use(row, column, scaled(pairs.x), scaled(pairs.y), weight(column));
      }
    }
  }
  __syncwarp();
  if (lane == 0) {
    Ring used = from;
    for (u32 first = 0; first < a.hidden; first += FLOATS, used.go_on()) barrier_arrive(used.empty + 8 * used.stage);
  }
  if (!IS_SHORT) share_squares(square, rows, shared);
  sync_computing();
}

// Rows that are words of two bf16 each.
template <u32 MOST>
DEVICE void stage_pairs(const StepArgs& a, const Bench& bench, const u64* words, u32 width, u32 round) {
  receive_rows<4>(words, rows_of<MOST>(a), width / 2, round, THREADS, [](u32) { return 0; }, [&](u32 row, u32 column, u32 x, u32 y, int) {
    put_pair(bench, row, 2 * column, x);
    put_pair(bench, row, 2 * column + 2, y);
  });
  sync_computing();
}

// Two neighbouring outputs, which two neighbouring lanes have, as one word. All lanes.
DEVICE void send_pair(bool has_one, u64* row, u32 output, float x, u32 round) {
  const float other = __shfl_xor_sync(ALL_LANES, x, 1);
  if (has_one && output % 2 == 0) send_word(row + output / 2, pack(x, other), round);
}

DEVICE float gate_of(const StepArgs& a, float gate, float up) {
  gate = to_float(from_float<bf16>(gate)), up = to_float(from_float<bf16>(up));
  float x = gate;
  if (a.is_gelu) {
    const float linear = 1.5957691216f;
    x = gate * __fmaf_rn(gate * gate, linear * 0.044715f, linear);
  }
  return __fdividef(gate, 1.0f + __expf(-x)) * up;
}

// How many blocks share a stream, as a power of two: from the longest, so that all of the grid says the same.
DEVICE u32 splits_of(const StepArgs& a, const Shared& shared) {
  u32 longest = 0;
  for (u32 row = 0; row < a.rows; row++) longest = max(longest, shared.len[row]);
  if (a.window) longest = min(longest, a.window);
  u32 power = 0;
  while (power < 4 && (a.rows * a.kv_heads << power + 1) <= gridDim.x && longest > 128u << power && GROUP * HEAD_DIM % (4u << power) == 0)
    power++;
  return power;
}

// What block `index` of the tasks does; `shared.len` is there.
DEVICE Task task_of(const StepArgs& a, const Shared& shared, u32 power, u32 layer, u32 index) {
  const u32 split = index & (1u << power) - 1, row = (index >> power) / a.kv_heads, head = (index >> power) - row * a.kv_heads;
  const u32 len = shared.len[row], begin = a.window && len > a.window ? len - a.window : 0;
  const u32 each = (len - begin + (1u << power) - 1) >> power;
  Task task;
  task.row = row, task.head = head, task.split = split;
  bf16* keys = a.keys + layer * a.layer_stride + head * a.head_stride;
  task.stream = {keys, a.page_stride, a.kv_stride, a.slot_stride,
                 a.table + (u64)shared.seat[row] * a.table_stride, a.pages, a.page_size};
  task.begin = min(begin + split * each, len), task.end = min(task.begin + each, len);
  task.has_last = task.begin < len && task.end == len;
  task.old_end = task.has_last ? len - 1 : task.end;
  return task;
}

template <u32 MOST>
DEVICE void attention(const StepArgs& a, Ring& ring, const Head& norm, bool has_norm, const Words& words, const AttentionRoom& room, const float2* rotations,
                      const Shared& shared, u32 power, u32 layer, u32 round) {
  constexpr u32 ELEMENTS = GROUP * HEAD_DIM;
  const u32 q = a.kv_heads * ELEMENTS, kv = a.kv_heads * HEAD_DIM, tasks = rows_of<MOST>(a) * a.kv_heads << power;
#pragma unroll 1
  for (u32 index = blockIdx.x; index < tasks; index += gridDim.x) {
    Task task = task_of(a, shared, power, layer, index);
    const u32 row = task.row, head = task.head;
    const u64* of_row = words.qkv + row * ((q + 2 * kv) / 2);
    task.q = of_row + head * (ELEMENTS / 2), task.k = of_row + (q + head * HEAD_DIM) / 2, task.v = task.k + kv / 2;
    task.norm = norm, task.has_norm = has_norm;
    task.rotations = rotations + row * (HEAD_DIM / 2);
    task.eps = a.eps, task.scale = a.scale, task.round = round;
    const u32 page = shared.page[row], slot = shared.slot[row];
    const bool is_there = page < a.pages && slot < a.page_size;
    task.place = is_there ? (bf16*)task.stream.keys + page * a.page_stride + slot * a.slot_stride : nullptr;
    attend(ring, task, room);

    u64* to = words.attended + row * (q / 2) + head * (ELEMENTS / 2);
    u64* mine = words.parts + (u64)index * GROUP * PART;
#pragma unroll 1
    for (u32 first = threadIdx.x / 32 * 32; first < ELEMENTS; first += THREADS) {
      const u32 i = first + threadIdx.x % 32, g = i / HEAD_DIM, d = i % HEAD_DIM;
      const Sum one = join_parts(WARPS, [&](u32 p) {
        const float* part = room.parts + (p * GROUP + g) * PART;
        return Sum{part[d], part[HEAD_DIM], part[HEAD_DIM + 1]};
      });
      if (power == 0) {
        send_pair(true, to, i, __fdividef(one.sum, one.weight), round);
      } else {
        send_word(mine + g * PART + d, __float_as_uint(one.sum), round);
        if (d == 0) send_word(mine + g * PART + HEAD_DIM, __float_as_uint(one.maximum), round);
        if (d == 1) send_word(mine + g * PART + HEAD_DIM + 1, __float_as_uint(one.weight), round);
      }
    }
    if (power > 0) {
      // Each of the blocks puts a slice of the elements together, of which a thread receives one of one part.
      const u32 slice = ELEMENTS >> power;
      float* gathered = room.parts + WARPS * GROUP * PART;  // [2^power][slice][3]
#pragma unroll 1
      for (u32 i = threadIdx.x; i < ELEMENTS; i += THREADS) {
        const u32 part = i / slice, element = task.split * slice + i - part * slice;
        const u64* from = words.parts + (u64)(index - task.split + part) * GROUP * PART + element / HEAD_DIM * PART;
        float* there = gathered + i * 3;
        u32 sum, maximum, weight;
        receive_words(round, from + element % HEAD_DIM, sum, from + HEAD_DIM, maximum, from + HEAD_DIM + 1, weight);
        there[0] = __uint_as_float(sum), there[1] = __uint_as_float(maximum), there[2] = __uint_as_float(weight);
      }
      sync_computing();
#pragma unroll 1
      for (u32 first = threadIdx.x / 32 * 32; first < slice; first += THREADS) {
        const u32 i = first + threadIdx.x % 32;
        Sum one = {};
        if (i < slice)
          one = join_parts(1u << power, [&](u32 p) {
            const float* there = gathered + (p * slice + i) * 3;
            return Sum{there[0], there[1], there[2]};
          });
        send_pair(i < slice, to, task.split * slice + i, __fdividef(one.sum, one.weight), round);
      }
    }
    if (index + gridDim.x < tasks) sync_computing();
  }
}

template <u32 MOST>
DEVICE void decode_step(const StepArgs& a) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  const u32 rows = rows_of<MOST>(a);
  const u32 q = a.kv_heads * GROUP * HEAD_DIM, kv = a.kv_heads * HEAD_DIM;
  const u32 start = shared_address(memory);
  Ring ring = {start, shared_address(shared.full), shared_address(shared.empty), a.stages, 0, 0};
  if (threadIdx.x < a.stages) {
    barrier_init_of(ring.full + 8 * threadIdx.x, 1);
    barrier_init_of(ring.empty + 8 * threadIdx.x, WARPS);
  }
  if (threadIdx.x == 0) shared.share = 1.0f / (float)a.hidden;
  if (threadIdx.x < rows) {
    const u64 most = (u64)a.table_stride * a.page_size;
    shared.seat[threadIdx.x] = min(a.seat[threadIdx.x], a.seats - 1);
    shared.page[threadIdx.x] = a.page[threadIdx.x], shared.slot[threadIdx.x] = a.slot[threadIdx.x];
    shared.len[threadIdx.x] = (u32)min((u64)max(a.len[threadIdx.x], 1u), most);
  }
  async_proxy_fence();
  __syncthreads();
  const u32 power = splits_of(a, shared);

  if (threadIdx.x >= THREADS) {
    const u32 tasks = rows * a.kv_heads << power;
    for (u32 layer = 0; layer < a.layers; layer++) {
      const LayerWeights w = a.weights[layer];
      bring_vector(ring, w.attn_norm, a.hidden);
      bring(ring, w.qkv, a.hidden, q + 2 * kv, 1);
      for (u32 index = blockIdx.x; index < tasks; index += gridDim.x) {
        const Task task = task_of(a, shared, power, layer, index);
        task.stream.bring(ring, task.begin, task.old_end);
      }
      bring(ring, w.o, q, a.hidden, 1);
      bring_vector(ring, w.ffn_norm, a.hidden);
      bring(ring, w.gate_up, a.hidden, a.ffn, 2);
      bring(ring, w.down, a.ffn, a.hidden, 1);
    }
    bring_vector(ring, a.norm, a.hidden);
    bring(ring, a.head, a.hidden, a.vocab, 1);
    return;
  }

  // Rows; sums of products or, at other times, parts of attention; the residual stream of this block's tiles; rotations;
  // queries, key and value.
  Bench bench = {start + a.stages * STAGE, (2 * max(a.hidden, max(q, a.ffn)) + 127) / 128 * 128 + 64, nullptr, 0};
  char* next = memory + a.stages * STAGE + rows * bench.x_pitch;
  bench.sums = (float*)next;
  float* parts = (float*)next;
  next += 4 * max(2 * WARPS * rows * 8 * TILES, WARPS * GROUP * PART + 3 * GROUP * HEAD_DIM);
  const AttentionRoom room = {parts, (float*)next};
  next += 4 * (GROUP + 2) * HEAD_DIM;
  const u32 tiles = a.hidden / 8, own_tiles = (tiles + gridDim.x - 1) / gridDim.x;
  float* own = (float*)next;  // [own tiles][8][rows]
  next += 4 * own_tiles * 8 * rows;
  float2* rotations = (float2*)next;  // [rows][HEAD_DIM / 2]

  const Words words(a, q, kv);
  const u32 before = *a.step * a.layers;
  for (u32 i = threadIdx.x; i < rows * (HEAD_DIM / 2); i += THREADS) {
    const Rotation r = rotation(a.phases[i % (HEAD_DIM / 2)] * a.position[i / (HEAD_DIM / 2)]);
    rotations[i] = make_float2(r.cos, r.sin);
  }
  for (u32 i = threadIdx.x; i < own_tiles * 8 * rows; i += THREADS) {
    const u32 row = i % rows, column = (blockIdx.x + i / rows / 8 * gridDim.x) * 8 + i / rows % 8, id = token_of(a, row);
    own[i] = column < a.hidden && id < a.vocab ? to_float(a.embed[(u64)id * a.hidden + column]) * a.embed_scale : 0.0f;
  }
  sync_computing();

  // Of the head that this warp norms in attention; the address is a layer ahead.
  const u32 warp = threadIdx.x / 32;
  auto norm_of = [&](u32 layer) {
    return layer >= a.layers || warp > GROUP ? nullptr : warp < GROUP ? a.weights[layer].q_norm : a.weights[layer].k_norm;
  };
  auto bias_of = [&](u32 layer) { return layer < a.layers ? a.weights[layer].qkv_bias : nullptr; };
  const float *next_norm = norm_of(0), *next_bias = bias_of(0);
  float square[MOST];

#pragma unroll 1
  for (u32 layer = 0; layer < a.layers; layer++) {
    const u32 round = before + layer + 1;
    const float* bias = next_bias;
    const bool has_norm = next_norm;
    const Head norm = Head::of_weights(next_norm);
    next_norm = norm_of(layer + 1), next_bias = bias_of(layer + 1);
    auto add_own = [&](u64* to) {
      return [&, to](bool has_one, u32 row, u32 local, u32 output, float sum, float) {
        float x = 0.0f;
        if (has_one) {
          float& mine = own[(local * 8 + output % 8) * rows + row];
          x = mine += sum;
        }
        send_pair(has_one, to + row * (a.hidden / 2), output, x, round);
      };
    };
    auto share = [&] {
      if (IS_SHORT) share_squares(square, rows, shared);
    };
    stage_normed(a, ring, bench, shared, square, layer ? words.after_down : nullptr, round - 1);
    multiply<MOST, IS_SHORT, 1>(ring, bench, rows, a.hidden, q + 2 * kv, [&](bool has_one, u32 row, u32, u32 output, float sum, float) {
      float x = sum * factor_of(a, shared, row);
      if (bias && has_one) x += bias[output];
      send_pair(has_one, words.qkv + row * ((q + 2 * kv) / 2), output, x, round);
    }, share);
    attention<MOST>(a, ring, norm, has_norm, words, room, rotations, shared, power, layer, round);
    if (blockIdx.x < tiles) {
      stage_pairs<MOST>(a, bench, words.attended, q, round);
      multiply<MOST, false, 1>(ring, bench, rows, q, a.hidden, add_own(words.after_o), [] {});
    }
    stage_normed(a, ring, bench, shared, square, words.after_o, round);
    multiply<MOST, IS_SHORT, 2>(ring, bench, rows, a.hidden, a.ffn, [&](bool has_one, u32 row, u32, u32 output, float gate, float up) {
      const float factor = factor_of(a, shared, row);
      send_pair(has_one, words.gated + row * (a.ffn / 2), output, gate_of(a, gate * factor, up * factor), round);
    }, share);
    if (blockIdx.x < tiles) {
      stage_pairs<MOST>(a, bench, words.gated, a.ffn, round);
      multiply<MOST, false, 1>(ring, bench, rows, a.ffn, a.hidden, add_own(words.after_down), [] {});
    }
  }
  stage_normed(a, ring, bench, shared, square, words.after_down, before + a.layers);
  multiply<MOST, IS_SHORT, 1>(ring, bench, rows, a.hidden, a.vocab, [&](bool has_one, u32 row, u32, u32 output, float sum, float) {
    if (has_one && output < a.vocab) a.logits[(u64)row * a.vocab + output] = sum * factor_of(a, shared, row);
  }, [&] {
    if (IS_SHORT) share_squares(square, rows, shared);
  });
  // Every block has read it: what this one has received depends on all of them.
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.step += 1;
}

#define DECODE_STEP(rows)                                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step_##rows(const __grid_constant__ StepArgs a) { \
    decode_step<rows>(a);                                                                                             \
  }
DECODE_STEP(1)
DECODE_STEP(4)
DECODE_STEP(8)
#endif
