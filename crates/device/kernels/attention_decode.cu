// Paged attention of one query token per row ("decode"), split over the context.
//
//   extern "C" __global__ void attention_decode(AttentionArgs args)
//
// Macros beside those of attention.cuh:
//   -D GROUP_TILE=8 | 16     the smaller one that is >= group
//   -D WARPS, -D STAGES      warps per block and tiles in flight per warp. Defaults, from ROW = HEAD_DIM * element size:
//                              ROW 512: WARPS 4, STAGES 3    ROW 128: WARPS 8, STAGES 6
//                              ROW 256: WARPS 8, STAGES 3    ROW  64: WARPS 8, STAGES 8
//                            sized for the 227 KiB of sm_90 and sm_100. sm_80 (163 KiB): the same with STAGES 2, 2, 4, 8;
//                            sm_86/89 (99 KiB): WARPS 4 (ROW 512: 2) with STAGES 2, 2, 4, 8.
//
// Rows taken: span == 1. A row of len 0 gets 0.
//
// Launch: grid (G, 1, 1), G = processors of the device (any G is right; this one is fast);
//         block (32 * WARPS, 1, 1);
//         dynamic shared memory, bytes:
//           WARPS * STAGES * (2 * (16 * ROW + 128) + 8) + WARPS * (GROUP_TILE * 8 + 1024) + 4 * (rows + 1) + 512
//           and 8192 more for HEAD_DIM 256 with GROUP_TILE 16,
//         with `rows` of the arguments; set the function's limit to the largest that will be used.
// Workspace: chunk == 0: counter 4 * (8 * G + 2) bytes, partial 16 * G * P bytes;
//            chunk > 0:  counter 4 * (rows * kv_heads + 2) bytes, partial rows * kv_heads * ceil(max_len / chunk) * P bytes;
//            P = 4 * GROUP_TILE * (HEAD_DIM + 2). Launches that may overlap in time need workspaces of their own.
//
// Deterministic: the same arguments and G give the same bits. With chunk > 0 a row's bits depend on its own
// query, keys, values and len alone, whatever the batch and G.

#include "attention.cuh"
#include "mma.cuh"

// ---- Geometry ------------------------------------------------------------------------------------------------

constexpr int TILE = 16;                             // tokens of one tile: what a warp loads and multiplies at once
constexpr int ESIZE = KV_TYPE == KV_E4M3 ? 1 : 2;    // bytes of an element
constexpr int ROW = HEAD_DIM * ESIZE;                // bytes of a token's keys
#ifndef WARPS
#define WARPS (ROW >= 512 ? 4 : 8)
#endif
#ifndef STAGES
#define STAGES (ROW >= 256 ? 3 : ROW == 128 ? 6 : 8)
#endif
constexpr int THREADS = 32 * WARPS;
constexpr int HALF = TILE * ROW + 128;               // keys or values of a tile in shared memory
constexpr int STAGE = 2 * HALF;
constexpr int QUERY_TILES = GROUP_TILE / 8;
constexpr int DIM_TILES = HEAD_DIM / 16;
constexpr int K_CHUNKS = ROW / 64;                   // 16-byte pieces of a key that a lane reads
constexpr int V_DIMS = ESIZE == 1 && HEAD_DIM >= 128 ? 16 : 8;  // neighbouring value elements of a lane
constexpr int V_PIECES = HEAD_DIM / (8 * V_DIMS);
constexpr int K_STEPS = 4 / ESIZE;                   // products per 16-byte piece of a key
constexpr bool SHARED_QUERY = HEAD_DIM * GROUP_TILE >= 4096;  // too many registers otherwise
constexpr int QUERY_BYTES = SHARED_QUERY ? 2 * HEAD_DIM * GROUP_TILE : 0;
constexpr int PARTIAL = GROUP_TILE * (HEAD_DIM + 2); // floats: sums, then maxima, then weights

// A tile in shared memory is four blocks of four tokens, each block 32 bytes further from a 128-byte line than the
// last. Lane 4g+c reads the keys of tokens slot_token(g) and +2 and the values of slot_token(2c), (2c+1) and +2,
// 16 bytes at a time; with this order of tokens the eight lanes of a phase touch eight different bank groups.
DEVICE int slot_token(int slot) { return 4 * ((slot / 2 + 2 * slot) & 3) + (slot & 1); }
DEVICE int token_offset(int token) { return token * ROW + token / 4 * 32; }

// ---- Work ----------------------------------------------------------------------------------------------------

// A run of tiles of one row and head, whole or part of the stream. Units are tiles (chunk == 0) or chunks, numbered
// through rows, heads of a row and tiles of a head; a block takes consecutive units.
struct Segment {
    u32 row, head;
    u32 unit;         // first unit
    u32 units;        // units taken
    u32 first, end;   // tiles, counted from the start of the stream
};

struct Work {
    const AttentionArgs& a;
    const u32* before;   // [rows + 1] units per head of all rows before
    u32 chunk_tiles;
    u32 end;             // unit behind this block's last

    DEVICE u32 begin_token(u32 len) const { return a.window && len > a.window ? len - a.window : 0; }

    DEVICE u32 row_units(u32 row) const {
        if (a.span[row] != 1) return 0;
        u32 len = a.len[row];
        u32 tiles = (len + TILE - 1) / TILE - begin_token(len) / TILE;
        return chunk_tiles ? (tiles + chunk_tiles - 1) / chunk_tiles : tiles;
    }

    // The segment that begins at `unit`, which lies in `row` or behind it.
    DEVICE Segment at(u32 unit, u32 row) const {
        while (unit >= before[row + 1] * a.kv_heads) row++;
        u32 per_head = before[row + 1] - before[row];
        u32 local = unit - before[row] * a.kv_heads;
        u32 head = local / per_head;
        u32 offset = local - head * per_head;
        u32 len = a.len[row];
        u32 first = begin_token(len) / TILE, last = (len + TILE - 1) / TILE;
        if (chunk_tiles) {
            first += offset * chunk_tiles;
            return {row, head, unit, 1, first, min(first + chunk_tiles, last)};
        }
        u32 units = min(per_head - offset, end - unit);
        return {row, head, unit, units, first + offset, first + offset + units};
    }

    DEVICE bool next(Segment& s) const {
        if (s.unit + s.units >= end) return false;
        s = at(s.unit + s.units, s.row);
        return true;
    }
};

// ---- Loading -------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory"); }

#if __CUDA_ARCH__ >= 900
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
DEVICE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
DEVICE void async_proxy_fence() {}
#endif

// Brings the tiles of one warp, STAGES ahead of their use: tiles warp, warp + WARPS, ... of every segment.
struct Loader {
    const Work& work;
    Segment segment;
    u32 tile;        // next to be loaded
    bool more;
    u32 held;        // tiles whose offsets the lanes hold, from `tile` on
    i64 offset;      // lane i: element offset of the i-th of them
    u32 warp, lane, stages, barriers;  // shared addresses of this warp's stages and barriers
    bool runs;       // the tokens of a tile lie together in memory

    DEVICE bool find() {
        while (more && tile >= segment.end) {
            more = work.next(segment);
            tile = segment.first + warp;
            held = 0;
        }
        return more;
    }

    DEVICE i64 token_element(u32 position) const {
        const AttentionArgs& a = work.a;
        u32 page = a.table[(u64)a.seat[segment.row] * a.table_stride + position / a.page_size];
        return page * a.page_stride + position % a.page_size * a.slot_stride + segment.head * a.head_stride;
    }

    DEVICE void load(u32 stage) {
        u32 target = stages + stage * STAGE;
        bool found = find();
        const AttentionArgs& a = work.a;
        const char* k = (const char*)a.k;
        const char* v = (const char*)a.v;
#if __CUDA_ARCH__ >= 900
        if (!found) return;
        u32 barrier = barriers + stage * 8;
        if (runs) {
            if (!held) {
                u32 mine = tile + lane * WARPS;
                if (mine < segment.end) offset = token_element(mine * TILE);
                held = 32;
            }
            i64 bytes = __shfl_sync(~0u, offset, 32 - held) * ESIZE;
            held--;
            if (lane == 0) barrier_expect(barrier, 2 * TILE * ROW);
            if (lane < 8) {
                u32 block = lane % 4;
                copy_bulk(target + lane / 4 * HALF + block * (4 * ROW + 32), (lane < 4 ? k : v) + bytes + block * (4 * ROW),
                          4 * ROW, barrier);
            }
        } else {
            u32 token = lane % 16, len = a.len[segment.row], position = tile * TILE + token;
            bool inside = position < len && position >= work.begin_token(len);
            u32 count = __popc(__ballot_sync(~0u, inside));
            if (lane == 0) barrier_expect(barrier, count * ROW);
            if (inside)
                copy_bulk(target + lane / 16 * HALF + token_offset(token), (lane < 16 ? k : v) + token_element(position) * ESIZE,
                          ROW, barrier);
        }
#else
        if (found) {
            u32 len = a.len[segment.row], position = tile * TILE + lane % 16;
            bool inside = position < len && position >= work.begin_token(len);
            i64 bytes = inside ? token_element(position) * ESIZE : 0;
            constexpr int PIECES = ROW / 16;
            for (u32 i = lane; i < TILE * PIECES; i += 32) {
                u32 token = i / PIECES, piece = i % PIECES * 16;
                i64 from = __shfl_sync(~0u, bytes, token);
                u32 size = __shfl_sync(~0u, inside, token) ? 16 : 0;
                u32 to = target + token_offset(token) + piece;
                copy_async16(to, k + from + piece, size);
                copy_async16(to + HALF, v + from + piece, size);
            }
        }
        copy_async_commit();
        if (!found) return;
#endif
        tile += WARPS;
    }
};

// ---- One tile ------------------------------------------------------------------------------------------------

// Running softmax of one warp. Lane 4g+c has queries 8t+2c and 8t+2c+1 of every query tile t, and of the sums the
// elements value_dim(i, g) and the next.
struct Accumulator {
    float maximum[QUERY_TILES][2];
    float weight[QUERY_TILES][2];  // of this lane's tokens
    float sum[DIM_TILES][QUERY_TILES][4];
};

DEVICE u32 value_dim(u32 dim_tile, u32 g) {
    constexpr u32 PAIRS = V_DIMS / 2;
    return V_DIMS * (g + 8 * (dim_tile / PAIRS)) + dim_tile % PAIRS * 2;
}

// The row's queries of one head as the products want them, in registers or, the block's warps together, in shared memory.
struct Query {
    u32 word[SHARED_QUERY ? 1 : QUERY_TILES][SHARED_QUERY ? 1 : K_CHUNKS][K_STEPS][2];
    u32 shared, lane;

    DEVICE u32 address(int t, int i, int s) const { return shared + (((t * K_CHUNKS + i) * K_STEPS + s) * 32 + lane) * 8; }

    // All threads of the block.
    DEVICE void load(const AttentionArgs& a, u32 row, u32 head) {
        const QElement* base = (const QElement*)a.q + (i64)a.token_start[row] * a.q_stride + head * a.group * HEAD_DIM;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
            u32 member = t * 8 + lane / 4;
            const QElement* q = base + member * HEAD_DIM + lane % 4 * (4 * K_STEPS);
#pragma unroll
            for (int i = 0; i < K_CHUNKS; i++) {
                if (SHARED_QUERY && i % WARPS != threadIdx.x / 32) continue;
#pragma unroll
                for (int s = 0; s < K_STEPS; s++) {
                    Float4 x = {0.f, 0.f, 0.f, 0.f};
                    if (member < a.group) x = load_q4(q + i * 16 * K_STEPS + s * 4);
                    u32 low = pack_half(x.x, x.y), high = pack_half(x.z, x.w);
                    if (SHARED_QUERY) asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address(t, i, s)), "r"(low), "r"(high) : "memory");
                    else word[t][i][s][0] = low, word[t][i][s][1] = high;
                }
            }
        }
        if (SHARED_QUERY) __syncthreads();
    }

    DEVICE Word2 at(int t, int i, int s) const {
        if (SHARED_QUERY) return load_shared2(address(t, i, s));
        return {word[t][i][s][0], word[t][i][s][1]};
    }
};

// Two products' worth of a 16-bit key piece, four of an 8-bit one: words k, k+1 of the mma's k index.
DEVICE void key_words(Word4 w, u32 (&out)[K_STEPS][2]) {
    u32 word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int s = 0; s < K_STEPS; s++) {
        if (ESIZE == 1) {
            out[s][0] = e4m3x2_to_f16x2(word[s]);
            out[s][1] = e4m3x2_to_f16x2(word[s] >> 16);
        } else {
            out[s][0] = word[2 * s % 4];
            out[s][1] = word[(2 * s + 1) % 4];
        }
    }
}

DEVICE void scores(float (&score)[QUERY_TILES][4], const Query& query, u32 keys, u32 lane) {
    float odd[QUERY_TILES][4];
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[t][i] = odd[t][i] = 0.f;
    u32 address = keys + token_offset(slot_token(lane / 4)) + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < K_CHUNKS; i++) {
        u32 low[K_STEPS][2], high[K_STEPS][2];
        key_words(load_shared4(address + i * 64), low);
        key_words(load_shared4(address + i * 64 + 2 * ROW), high);
#pragma unroll
        for (int s = 0; s < K_STEPS; s++)
#pragma unroll
            for (int t = 0; t < QUERY_TILES; t++) {
                Word2 q = query.at(t, i, s);
                mma(s % 2 ? odd[t] : score[t], low[s][0], high[s][0], low[s][1], high[s][1], q.x, q.y);
            }
    }
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[t][i] += odd[t][i];
}

DEVICE void add_values(Accumulator& acc, const u32 (&p)[QUERY_TILES][2], u32 values, u32 lane, bool edge, const bool (&use)[4]) {
    u32 g = lane / 4, c = lane % 4;
    u32 address[2] = {values + token_offset(slot_token(2 * c)) + g * V_DIMS * ESIZE,
                      values + token_offset(slot_token(2 * c + 1)) + g * V_DIMS * ESIZE};
#pragma unroll
    for (int piece = 0; piece < V_PIECES; piece++) {
        constexpr int WORDS = V_DIMS * ESIZE / 4;
        u32 word[4][WORDS];  // tokens 2c, 2c+1, 2c+8, 2c+9 in the mma's k index
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 from = address[t % 2] + t / 2 * 2 * ROW + piece * 8 * V_DIMS * ESIZE;
            if constexpr (WORDS == 4) {
                Word4 w = load_shared4(from);
                word[t][0] = w.x, word[t][1] = w.y, word[t][2] = w.z, word[t][3] = w.w;
            } else {
                Word2 w = load_shared2(from);
                word[t][0] = w.x, word[t][1] = w.y;
            }
        }
        if (edge) {  // what lies beyond the stream may be NaN, and 0 * NaN would be too
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < WORDS; i++) word[t][i] = use[t] ? word[t][i] : 0;
        }
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (ESIZE == 2) {
                u32 a0 = __byte_perm(word[0][i], word[1][i], 0x5410), a1 = __byte_perm(word[0][i], word[1][i], 0x7632);
                u32 a2 = __byte_perm(word[2][i], word[3][i], 0x5410), a3 = __byte_perm(word[2][i], word[3][i], 0x7632);
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) mma(acc.sum[piece * WORDS + i][t], a0, a1, a2, a3, p[t][0], p[t][1]);
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 low = __byte_perm(word[0][i], word[1][i], h ? 0x7362 : 0x5140);
                    u32 high = __byte_perm(word[2][i], word[3][i], h ? 0x7362 : 0x5140);
                    u32 a0 = e4m3x2_to_f16x2(low), a1 = e4m3x2_to_f16x2(low >> 16);
                    u32 a2 = e4m3x2_to_f16x2(high), a3 = e4m3x2_to_f16x2(high >> 16);
#pragma unroll
                    for (int t = 0; t < QUERY_TILES; t++)
                        mma(acc.sum[(piece * WORDS + i) * 2 + h][t], a0, a1, a2, a3, p[t][0], p[t][1]);
                }
            }
        }
    }
}

DEVICE void attend_tile(Accumulator& acc, const Query& query, u32 stage, u32 tile, u32 begin, u32 len, float scale2, float softcap,
                        u32 lane) {
    float score[QUERY_TILES][4];
    scores(score, query, stage, lane);
    bool edge = tile * TILE < begin || tile * TILE + TILE > len;
    u32 token = tile * TILE + slot_token(lane / 4);
    u32 p[QUERY_TILES][2];
    bool grew = false;
    float maximum[QUERY_TILES][2];
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[t][i] = logit2(score[t][i], scale2, softcap);
            u32 position = token + i / 2 * 2;
            if (edge && (position < begin || position >= len)) score[t][i] = MINUS_INF;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            maximum[t][i] = fmaxf(acc.maximum[t][i], max_over_rows(fmaxf(score[t][i], score[t][i + 2])));
            grew |= maximum[t][i] > acc.maximum[t][i];
        }
    }
    if (__any_sync(~0u, grew)) {
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                shrink[i] = exp2_approx(acc.maximum[t][i] - maximum[t][i]);
                acc.maximum[t][i] = maximum[t][i];
                acc.weight[t][i] *= shrink[i];
            }
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc.sum[d][t][i] *= shrink[i % 2];
        }
    }
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[t][i] = exp2_approx(score[t][i] - acc.maximum[t][i % 2]);
            acc.weight[t][i % 2] += score[t][i];
        }
        p[t][0] = transpose8x8(pack_half(score[t][0], score[t][1]));
        p[t][1] = transpose8x8(pack_half(score[t][2], score[t][3]));
    }
    bool use[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 position = tile * TILE + slot_token(lane % 4 * 2 + t % 2) + t / 2 * 2;
        use[t] = position >= begin && position < len;
    }
    add_values(acc, p, stage + HALF, lane, edge, use);
}

// ---- Putting parts together ----------------------------------------------------------------------------------

struct Parts {
    u32 count;    // blocks (chunk == 0) or chunks that share the stream's head
    u32 counter;
    u32 first;    // number of the first part
    u32 mine;     // number of this one
};

// Unit u belongs to block block_of(u) when `total` units are dealt to `blocks`: block i begins at i * total / blocks.
DEVICE u32 block_begin(u32 i, u32 total, u32 blocks) { return (u64)i * total / blocks; }
DEVICE u32 block_of(u32 unit, u32 total, u32 blocks) { return (((u64)unit + 1) * blocks - 1) / total; }

DEVICE Parts parts_of(const Work& work, const Segment& s, u32 total, u32 blocks) {
    u32 per_head = work.before[s.row + 1] - work.before[s.row];
    u32 begin = work.before[s.row] * work.a.kv_heads + s.head * per_head;
    if (work.chunk_tiles) return {per_head, s.row * work.a.kv_heads + s.head, begin, s.unit};
    u32 first = block_of(begin, total, blocks), last = block_of(begin + per_head - 1, total, blocks);
    // A block has at most two parts of streams that it shares: 2i for the one it begins with, 2i + 1 for a later one.
    auto number = [&](u32 block) { return 2 * block + (block == first && block_begin(block, total, blocks) != begin); };
    return {last - first + 1, first, number(first), number(blockIdx.x)};
}

DEVICE float* part_at(const Work& work, const Parts& parts, u32 i) {
    u32 number = work.chunk_tiles ? parts.first + i : i == 0 ? parts.first : (parts.first / 2 + i) * 2;
    return work.a.partial + (u64)number * PARTIAL;
}

DEVICE float load_l2(const float* p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
DEVICE Float4 load_l2(const Float4* p) {
    Float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
    return x;
}

// All parts of a row and head into out, in the order of the stream.
DEVICE void combine(const Work& work, const Parts& parts, QElement* out) {
    constexpr u32 BATCH = 8;
    for (u32 i = threadIdx.x; i < work.a.group * (HEAD_DIM / 4); i += THREADS) {
        u32 member = i / (HEAD_DIM / 4);
        float maximum = MINUS_INF, weight = 0.f;
        Float4 sum = {0.f, 0.f, 0.f, 0.f};
        for (u32 from = 0; from < parts.count; from += BATCH) {
            float m[BATCH], w[BATCH];
            Float4 x[BATCH];
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) {
                const float* part = part_at(work, parts, min(from + j, parts.count - 1));
                m[j] = load_l2(part + GROUP_TILE * HEAD_DIM + member);
                w[j] = load_l2(part + GROUP_TILE * (HEAD_DIM + 1) + member);
                x[j] = load_l2((const Float4*)part + i);
            }
            float top = maximum;
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) top = fmaxf(top, m[j]);
            float f = exp2_approx(maximum - top);
            maximum = top;
            weight *= f, sum.x *= f, sum.y *= f, sum.z *= f, sum.w *= f;
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) {
                f = from + j < parts.count ? exp2_approx(m[j] - top) : 0.f;
                weight += f * w[j], sum.x += f * x[j].x, sum.y += f * x[j].y, sum.z += f * x[j].z, sum.w += f * x[j].w;
            }
        }
        float f = work.a.v_scale / weight;
        store_out2(out + i * 4, sum.x * f, sum.y * f);
        store_out2(out + i * 4 + 2, sum.z * f, sum.w * f);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------

struct Shared {
    Float2 weight[WARPS][GROUP_TILE];  // maximum and weight of each warp's share of a segment
    u32 freed[WARPS];                  // shared address of the stage where its sums lie
    u32 warp_units[WARPS];
    u32 last;
    u32 before[1];                     // [rows + 1]
};

// Sums units over rows into shared.before. All threads.
DEVICE void count_units(const Work& work, Shared& shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, carry = 0;
    if (threadIdx.x == 0) shared.before[0] = 0;
    for (u32 from = 0; from < work.a.rows; from += THREADS) {
        u32 row = from + threadIdx.x;
        u32 units = row < work.a.rows ? work.row_units(row) : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            u32 other = __shfl_up_sync(~0u, units, step);
            if (lane >= step) units += other;
        }
        __syncthreads();
        if (lane == 31) shared.warp_units[warp] = units;
        __syncthreads();
        u32 total = carry;
        for (u32 w = 0; w < WARPS; w++) {
            if (w == warp) units += total;
            total += shared.warp_units[w];
        }
        carry = total;
        if (row < work.a.rows) shared.before[row + 1] = units;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_decode(const __grid_constant__ AttentionArgs a) {
    extern __shared__ __align__(128) char memory[];
    u64* barrier_memory = (u64*)(memory + WARPS * STAGES * STAGE + QUERY_BYTES);
    Shared& shared = *(Shared*)(barrier_memory + WARPS * STAGES);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 barriers = shared_address(barrier_memory + warp * STAGES);
    u32 stages = shared_address(memory) + warp * STAGES * STAGE;
#if __CUDA_ARCH__ >= 900
    if (lane < STAGES) barrier_init(barriers + lane * 8);
    async_proxy_fence();
#endif
    Work work = {a, shared.before, a.chunk / TILE, 0};
    count_units(work, shared);

    const u32 q_heads = a.kv_heads * a.group;
    for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x)
        if (a.span[row] == 1 && a.len[row] == 0) {
            QElement* out = (QElement*)a.out + (i64)a.token_start[row] * a.out_stride;
            for (u32 i = threadIdx.x; i < q_heads * HEAD_DIM / 2; i += THREADS) store_out2(out + 2 * i, 0.f, 0.f);
        }

    const u32 total = shared.before[a.rows] * a.kv_heads;
    if (total == 0) return;
    // A block with fewer tiles than warps would only add parts.
    const u32 blocks = min(gridDim.x, work.chunk_tiles ? total : (total + WARPS - 1) / WARPS);
    if (blockIdx.x >= blocks) return;
    const u32 begin_unit = block_begin(blockIdx.x, total, blocks);
    work.end = block_begin(blockIdx.x + 1, total, blocks);
    u32 low = 0, high = a.rows;  // the row of begin_unit: before[low] <= unit < before[high]
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (shared.before[middle] * a.kv_heads <= begin_unit) low = middle;
        else high = middle;
    }
    Segment segment = work.at(begin_unit, low);

    Loader loader = {work, segment, segment.first + warp, true, 0, 0, warp, lane, stages, barriers,
                     a.slot_stride == HEAD_DIM && a.page_size % TILE == 0};
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++) loader.load(i);

    const float scale2 = a.scale * a.k_scale * LOG2E;
    Query query;
    query.shared = shared_address(memory + WARPS * STAGES * STAGE), query.lane = lane;
    u32 stage = 0, parity = 0;
    while (true) {
        const u32 len = a.len[segment.row], begin = work.begin_token(len);
        query.load(a, segment.row, segment.head);
        Accumulator acc;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) acc.maximum[t][i] = MINUS_INF, acc.weight[t][i] = 0.f;
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc.sum[d][t][i] = 0.f;
        }
        // The warp's last stage of the segment is refilled only after its sums have lain there.
        u32 freed = ~0u;
#pragma unroll 1
        for (u32 tile = segment.first + warp; tile < segment.end; tile += WARPS) {
#if __CUDA_ARCH__ >= 900
            barrier_wait(barriers + stage * 8, parity);
#else
            copy_async_wait<STAGES - 1>();
            __syncwarp();
#endif
            attend_tile(acc, query, stages + stage * STAGE, tile, begin, len, scale2, a.softcap, lane);
            __syncwarp();
            if (tile + WARPS < segment.end) loader.load(stage);
            else freed = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }

        const bool whole = segment.units == work.before[segment.row + 1] - work.before[segment.row];
        QElement* out = (QElement*)a.out + (i64)a.token_start[segment.row] * a.out_stride + (i64)segment.head * a.group * HEAD_DIM;
        Parts parts = {};
        float* part = nullptr;
        if (!whole) {
            parts = parts_of(work, segment, total, blocks);
            part = a.partial + (u64)parts.mine * PARTIAL;
        }
        if (lane == 0) shared.freed[warp] = freed == ~0u ? ~0u : stages + freed * STAGE;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float weight = sum_over_rows(acc.weight[t][i]);
                if (lane < 4) shared.weight[warp][t * 8 + lane * 2 + i] = {acc.maximum[t][i], weight};
            }
            if (freed != ~0u)
#pragma unroll
                for (int d = 0; d < DIM_TILES; d++)
                    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(stages + freed * STAGE + (d * 32 + lane) * 16),
                                 "f"(acc.sum[d][t][0]), "f"(acc.sum[d][t][1]), "f"(acc.sum[d][t][2]), "f"(acc.sum[d][t][3]) : "memory");
            __syncthreads();
            float factor[WARPS][2], maximum[2], weight[2];
            const u32 member = t * 8 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                maximum[i] = MINUS_INF, weight[i] = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) maximum[i] = fmaxf(maximum[i], shared.weight[w][member + i].x);
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    factor[w][i] = exp2_approx(shared.weight[w][member + i].x - maximum[i]);
                    weight[i] += factor[w][i] * shared.weight[w][member + i].y;
                }
            }
#pragma unroll 1
            for (u32 d = warp; d < DIM_TILES; d += WARPS) {
                float x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    if (shared.freed[w] != ~0u) {
                        Word4 y = load_shared4(shared.freed[w] + (d * 32 + lane) * 16);
                        x[0] += factor[w][0] * __uint_as_float(y.x), x[1] += factor[w][1] * __uint_as_float(y.y);
                        x[2] += factor[w][0] * __uint_as_float(y.z), x[3] += factor[w][1] * __uint_as_float(y.w);
                    }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 at = (member + i) * HEAD_DIM + value_dim(d, lane / 4);
                    float f = a.v_scale / weight[i];
                    if (!whole) *(Float2*)(part + at) = {x[i], x[i + 2]};
                    else if (member + i < a.group) store_out2(out + at, x[i] * f, x[i + 2] * f);
                }
            }
            if (!whole && warp == 0 && lane < 4)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    part[GROUP_TILE * HEAD_DIM + member + i] = maximum[i];
                    part[GROUP_TILE * (HEAD_DIM + 1) + member + i] = weight[i];
                }
            async_proxy_fence();
            __syncthreads();
        }
        if (freed != ~0u) loader.load(freed);

        if (!whole) {
            // The block that finishes a stream's head last puts it together, whoever that is: the order is fixed.
            if (threadIdx.x == 0) {
                __threadfence();
                shared.last = atomicAdd(a.counter + parts.counter, 1u) == parts.count - 1;
                __threadfence();
            }
            __syncthreads();
            if (shared.last) {
                combine(work, parts, out);
                if (threadIdx.x == 0) a.counter[parts.counter] = 0;
            }
            __syncthreads();
        }
        if (!work.next(segment)) break;
    }
}
