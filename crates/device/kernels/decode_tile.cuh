// attention_decode: what a warp does with one tile of 16 tokens.
//
// Keys are the 16-row operand of the tensor cores and the queries of the head's group the 8-column one, so that a group
// of 4 wastes half of a product and not three quarters; scores come out as [token, query], go through the softmax, and
// are the column operand of the second product, whose rows are the elements of the values.
#pragma once
#include "mma.cuh"

constexpr int TILE = 16;                             // tokens that a warp loads and multiplies at once
constexpr bool SCALED = KV_TYPE == KV_I8;            // rows have their scales behind them
constexpr int ESIZE = KV_TYPE == KV_E4M3 || SCALED ? 1 : 2;  // bytes of an element
constexpr int DATA = HEAD_DIM * ESIZE;               // bytes of a token's keys
constexpr int ROW = DATA + (SCALED ? 4 : 0);         // with their scale
#ifndef WARPS
#define WARPS (ROW >= 512 ? 4 : ROW >= 256 || GROUP_TILE > 8 ? 8 : 12)
#endif
#ifndef STAGES
#define STAGES (ROW >= 256 ? 3 : ROW < 128 ? GROUP_TILE > 8 ? 8 : 7 : GROUP_TILE > 8 ? 6 : 4)
#endif
constexpr int THREADS = 32 * WARPS;
constexpr int HALF = TILE * ROW;                     // bytes of the keys, or the values, of a tile
constexpr int STAGE = 2 * HALF;
constexpr int QUERY_TILES = GROUP_TILE / 8;
constexpr int DIM_TILES = HEAD_DIM / 16;
constexpr int K_CHUNKS = DATA / 64;                  // 16-byte pieces of a key that a lane reads
constexpr int K_STEPS = 4 / ESIZE;                   // products per such piece
constexpr int V_PIECES = DATA / 64;                  // 8-byte pieces of a value that a lane reads
constexpr bool SHARED_QUERY = HEAD_DIM * GROUP_TILE >= 4096;  // registers are short
constexpr int V_TURN = V_PIECES < 2 || SHARED_QUERY || SCALED ? 1 : V_PIECES < 4 ? 2 : 4;  // read in an order that differs by lane
constexpr int V_DIMS = 8 / ESIZE;                    // elements of such a piece
constexpr int QUERY_BYTES = SHARED_QUERY ? 2 * HEAD_DIM * GROUP_TILE : 0;

// Running softmax of one warp. Lane 4g+c has queries 8t+2c and 8t+2c+1 of every query tile t, and of the sums the
// elements value_dim(d, g) and the next for every dim tile d.
struct Accumulator {
    float maximum[QUERY_TILES][2];
    float weight[QUERY_TILES][2];  // of this lane's tokens
    float sum[DIM_TILES][QUERY_TILES][4];

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) maximum[t][i] = MINUS_INF, weight[t][i] = 0.f;
#pragma unroll
            for (int d = 0; d < DIM_TILES; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[d][t][i] = 0.f;
        }
    }
};

// Byte of a value at which the x-th piece of the lanes of group g lies.
DEVICE u32 value_piece(u32 x, u32 g) { return (x / V_TURN * 2 + g / 4) * (32 * V_TURN) + x % V_TURN * 32 + g % 4 * 8; }

// The same of the k-th word of a scaled row. Rows are an odd number of words apart: with these words the lanes of a warp
// read from banks of their own.
DEVICE u32 scaled_word(u32 k, u32 g) {
    return HEAD_DIM == 64 ? (g % 4 * 4 + k * 2 + g / 4) * 4 : (k / 4 * 32 + g % 4 * 8 + k % 4 * 2 + g / 4) * 4;
}

DEVICE u32 value_dim(u32 dim_tile, u32 g) {
    constexpr u32 PAIRS = V_DIMS / 2;
    if (SCALED) return scaled_word(dim_tile / 2, g) + dim_tile % 2 * 2;
    return value_piece(dim_tile / PAIRS, g) / ESIZE + dim_tile % PAIRS * 2;
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
            const u32 member = t * 8 + lane / 4;
            const QElement* q = base + member * HEAD_DIM + lane % 4 * (4 * K_STEPS);
#pragma unroll
            for (int i = 0; i < K_CHUNKS; i++) {
                if (SHARED_QUERY && i % WARPS != threadIdx.x / 32) continue;
#pragma unroll
                for (int s = 0; s < K_STEPS; s++) {
                    Word2 w = {0, 0};
                    if (member < a.group) w = load_half4(q + i * 16 * K_STEPS + s * 4);
                    if (SHARED_QUERY) asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address(t, i, s)), "r"(w.x), "r"(w.y) : "memory");
                    else word[t][i][s][0] = w.x, word[t][i][s][1] = w.y;
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

// Two products' worth of a 16-bit key piece, four of an 8-bit one.
DEVICE void key_words(const Word4& w, u32 (&out)[K_STEPS][2]) {
    const u32 word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int s = 0; s < K_STEPS; s++) {
        if (ESIZE == 1) {
            out[s][0] = widen_keys<0>(word[s]);
            out[s][1] = widen_keys<1>(word[s]);
        } else {
            out[s][0] = word[2 * s % 4];
            out[s][1] = word[(2 * s + 1) % 4];
        }
    }
}

DEVICE Word4 key_piece(u32 address) {
    if (!SCALED) return load_shared4(address);
    return {load_shared1(address), load_shared1(address + 4), load_shared1(address + 8), load_shared1(address + 12)};
}

DEVICE float scale_of(u32 half, u32 token) { return __uint_as_float(load_shared1(half + token * ROW + DATA)); }

DEVICE Word4 select(bool second, const Word4& x, const Word4& y) {
    return {second ? y.x : x.x, second ? y.y : x.y, second ? y.z : x.z, second ? y.w : x.w};
}

// Products of the keys at `keys` with the queries: lane 4g+c has tokens g and g+8, queries 2c and 2c+1.
DEVICE void scores(float (&score)[QUERY_TILES][4], const Query& query, u32 keys, u32 lane) {
    float odd[QUERY_TILES][4];
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[t][i] = odd[t][i] = 0.f;
    // Rows lie a multiple of the banks apart. Lanes of odd rows read two pieces in the other order than those of even
    // rows, which are then in other banks, and exchange them.
    constexpr int PAIR = K_CHUNKS > 1 && !SCALED ? 2 : 1;
    const bool swap = PAIR == 2 && lane / 4 % 2;
    const u32 address = keys + lane / 4 * ROW + lane % 4 * 16;
    const u32 from[2] = {address + (swap ? 64 : 0), address + (swap ? 0 : 64)};
#pragma unroll
    for (int i = 0; i < K_CHUNKS; i += PAIR) {
        Word4 low[2], high[2];
#pragma unroll
        for (int j = 0; j < PAIR; j++) low[j] = key_piece(from[j] + i * 64), high[j] = key_piece(from[j] + i * 64 + 8 * ROW);
#pragma unroll
        for (int j = 0; j < PAIR; j++) {
            u32 a[K_STEPS][2], b[K_STEPS][2];
            key_words(select(swap, low[j], low[PAIR - 1 - j]), a);
            key_words(select(swap, high[j], high[PAIR - 1 - j]), b);
#pragma unroll
            for (int s = 0; s < K_STEPS; s++)
#pragma unroll
                for (int t = 0; t < QUERY_TILES; t++) {
                    const Word2 q = query.at(t, i + j, s);
                    mma_keys(s % 2 && !SHARED_QUERY ? odd[t] : score[t], a[s][0], b[s][0], a[s][1], b[s][1], q.x, q.y);
                }
        }
    }
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[t][i] += odd[t][i];
}

// Reads the pieces x .. x + V_TURN - 1 of one token's value. Lane 4g+c begins with the c-th of them, since the tokens of
// the lanes c lie a multiple of the banks apart; then the pieces are turned back.
DEVICE void value_words(u32 (&word)[V_TURN][2], u32 token, int x, u32 lane) {
    if (SCALED) {
        word[0][0] = load_shared1(token + scaled_word(2 * x, lane / 4));
        word[0][1] = load_shared1(token + scaled_word(2 * x + 1, lane / 4));
        return;
    }
    const u32 c = lane % 4 % V_TURN, from = token + value_piece(x, lane / 4);
    Word2 read[V_TURN];
#pragma unroll
    for (int s = 0; s < V_TURN; s++) read[s] = load_shared2(from + (s + c) % V_TURN * 32);
#pragma unroll
    for (int turn = 1; turn < V_TURN; turn *= 2) {
        Word2 turned[V_TURN];
#pragma unroll
        for (int s = 0; s < V_TURN; s++) {
            const Word2 other = read[(s + V_TURN - turn) % V_TURN];
            turned[s] = c & turn ? other : read[s];
        }
#pragma unroll
        for (int s = 0; s < V_TURN; s++) read[s] = turned[s];
    }
#pragma unroll
    for (int s = 0; s < V_TURN; s++) word[s][0] = read[s].x, word[s][1] = read[s].y;
}

// Adds the values at `values`, weighted by p. use: which of the lane's tokens 2c, 2c+1, 2c+8, 2c+9 count, if `edge`.
DEVICE void add_values(Accumulator& acc, const u32 (&p)[QUERY_TILES][2], u32 values, u32 lane, bool edge, const bool (&use)[4]) {
    const u32 first = values + lane % 4 * 2 * ROW;
#pragma unroll
    for (int x = 0; x < V_PIECES; x += V_TURN) {
        u32 word[4][V_TURN][2];
#pragma unroll
        for (int t = 0; t < 4; t++) value_words(word[t], first + (t % 2 + t / 2 * 8) * ROW, x, lane);
        if (edge) {  // what lies beyond the stream may be NaN, and 0 * NaN would be too
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int i = 0; i < V_TURN; i++) word[t][i][0] = use[t] ? word[t][i][0] : 0, word[t][i][1] = use[t] ? word[t][i][1] : 0;
        }
#pragma unroll
        for (int i = 0; i < V_TURN; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 w0 = word[0][i][h], w1 = word[1][i][h], w2 = word[2][i][h], w3 = word[3][i][h];
                constexpr int PAIRS = V_DIMS / 2;
                if constexpr (ESIZE == 2) {
                    const u32 a0 = __byte_perm(w0, w1, 0x5410), a1 = __byte_perm(w0, w1, 0x7632);
                    const u32 a2 = __byte_perm(w2, w3, 0x5410), a3 = __byte_perm(w2, w3, 0x7632);
#pragma unroll
                    for (int t = 0; t < QUERY_TILES; t++) mma_values(acc.sum[(x + i) * PAIRS + h][t], a0, a1, a2, a3, p[t][0], p[t][1]);
                } else {
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const u32 low = __byte_perm(w0, w1, j ? 0x7362 : 0x5140), high = __byte_perm(w2, w3, j ? 0x7362 : 0x5140);
                        const u32 a0 = widen_values<0>(low), a1 = widen_values<1>(low);
                        const u32 a2 = widen_values<0>(high), a3 = widen_values<1>(high);
#pragma unroll
                        for (int t = 0; t < QUERY_TILES; t++)
                            mma_values(acc.sum[(x + i) * PAIRS + 2 * h + j][t], a0, a1, a2, a3, p[t][0], p[t][1]);
                    }
                }
            }
    }
}

// One tile of the stream: tokens tile * 16 .., of which those in [begin, len) count.
DEVICE void attend_tile(Accumulator& acc, const Query& query, u32 stage, u32 tile, u32 begin, u32 len, float scale2, float softcap,
                        u32 lane) {
    float score[QUERY_TILES][4];
    scores(score, query, stage, lane);
    if (SCALED) {
        const float scale[2] = {scale_of(stage, lane / 4), scale_of(stage, lane / 4 + 8)};
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[t][i] *= scale[i / 2];
    }
    const bool edge = tile * TILE < begin || tile * TILE + TILE > len;
    u32 p[QUERY_TILES][2];
    bool grew = false;
    float maximum[QUERY_TILES][2];
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[t][i] = logit2(score[t][i], scale2, softcap);
            const u32 position = tile * TILE + lane / 4 + i / 2 * 8;
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
    // What lies beyond the stream may have any scale.
    float of_value[2] = {1.f, 1.f};
    if (SCALED)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 token = lane / 4 + i * 8, position = tile * TILE + token;
            of_value[i] = edge && (position < begin || position >= len) ? 0.f : scale_of(stage + HALF, token);
        }
#pragma unroll
    for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[t][i] = exp2_approx(score[t][i] - acc.maximum[t][i % 2]);
            acc.weight[t][i % 2] += score[t][i];
            if (SCALED) score[t][i] *= of_value[i / 2];
        }
        p[t][0] = transpose8x8(pack_weights(score[t][0], score[t][1]));
        p[t][1] = transpose8x8(pack_weights(score[t][2], score[t][3]));
    }
    bool use[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const u32 position = tile * TILE + lane % 4 * 2 + t % 2 + t / 2 * 8;
        use[t] = position >= begin && position < len;
    }
    add_values(acc, p, stage + HALF, lane, edge, use);
}
