// Paged attention of rows with many query tokens ("prefill"), mixed spans and starts, FlashAttention-2 order of work.
//
//   extern "C" __global__ void attention_prefill(AttentionArgs args)
//
// Rows taken: span >= min_span. KV_TYPE: KV_BF16, KV_F16, KV_E4M3, KV_I8. A row of len 0 gets 0.
//
// A block takes BLOCK_M packed queries of one row and one key/value head: query i is token i / group, head i % group.
//   BLOCK_M = 128 (HEAD_DIM 256: 64)
// Launch: grid (ceil(tokens * group / BLOCK_M) + rows, kv_heads, 1), `tokens` and `rows` being bounds (blocks
//         without work leave at once); block (128, 1, 1);
//         dynamic shared memory, bytes: 2 * HEAD_DIM * (BLOCK_M + 4 * 64) + 1024
//         (HEAD_DIM 64: 49 KiB, 128: 97 KiB, 256: 161 KiB), and 1024 more for KV_I8.
// Workspace: none.
//
// Deterministic and batch invariant: a token's bits depend on its own row's span, len, keys and values alone.

#include "attention.cuh"
#include "mma.cuh"

// ---- Geometry ------------------------------------------------------------------------------------------------

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int BLOCK_M = HEAD_DIM == 256 ? 64 : 128;  // packed queries of a block
constexpr int BLOCK_N = 64;                          // tokens of the stream per pass
constexpr bool SCALED = KV_TYPE == KV_I8;            // rows have their scales behind them
constexpr int ESIZE = KV_TYPE == KV_E4M3 || SCALED ? 1 : 2;
constexpr int ROW = 2 * HEAD_DIM;                    // bytes of a query, key or value in shared memory
constexpr int TILE = BLOCK_N * ROW;                  // keys or values of a pass
constexpr int ROW_TILES = BLOCK_M / (16 * WARPS);    // 16-row tiles of a warp
constexpr int N_TILES = BLOCK_N / 8;
constexpr int D_TILES = HEAD_DIM / 8;
constexpr int K_STEPS = HEAD_DIM / 16;

// Shared memory: queries, then two passes of keys and values. With 8-bit elements: queries, one pass in 16 bits, and
// two passes as they come.
constexpr int QUERIES = BLOCK_M * ROW;
constexpr int RAW = QUERIES + 2 * TILE;
constexpr int RAW_ROW = HEAD_DIM + (SCALED ? 4 : 0);  // bytes, with a scale
constexpr int RAW_HALF = BLOCK_N * RAW_ROW;           // keys or values of a pass

// Byte of 16-byte piece `piece` of row `row`: pieces are exchanged so that eight rows' same piece lies in different banks.
DEVICE u32 swizzled(u32 row, u32 piece) { return row * ROW + (piece ^ (row & 7)) * 16; }

// What the block works on. It stays in shared memory, since registers are what this kernel is short of.
struct Item {
    u32 row;
    u32 first, queries;          // packed query i of the block is query first + i of the row's `queries`
    u32 start, len;              // of the row
    u32 begin, end;              // tokens that some query of the block sees
    u32 plain_from, plain_to;    // tokens that every query of the block sees

    DEVICE void set(const AttentionArgs& a, u32 of_row, u32 first_query) {
        row = of_row, first = first_query;
        queries = a.span[row] * a.group;
        len = a.length(row), start = len - a.span[row];
        const u32 behind_first = start + first / a.group + 1;
        const u32 behind_last = start + (min(first + BLOCK_M, queries) - 1) / a.group + 1;
        end = a.causal ? min(behind_last, len) : len;
        plain_to = a.causal ? min(behind_first, len) : len;
        begin = a.window && behind_first > a.window ? behind_first - a.window : 0;
        plain_from = a.window && behind_last > a.window ? behind_last - a.window : 0;
    }
};

// Finds the block's row and queries: rows are dealt in order, a row's last queries, which see most, first.
DEVICE bool find_item(const AttentionArgs& a, Item& found) {
    __shared__ u32 sums[WARPS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 carry = 0;
    for (u32 from = 0; from < a.rows && carry <= blockIdx.x; from += THREADS) {
        const u32 row = from + threadIdx.x;
        const u32 span = row < a.rows ? a.span[row] : 0;
        const bool taken = span && span >= a.min_span && a.has(row, span);
        const u32 mine = taken ? (span * a.group + BLOCK_M - 1) / BLOCK_M : 0;
        u32 before = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) sums[warp] = before;
        __syncthreads();
        before += carry - mine;
        for (u32 w = 0; w < WARPS; w++) {
            if (w < warp) before += sums[w];
            carry += sums[w];
        }
        if (blockIdx.x - before < mine)
            found.set(a, row, (mine - 1 - (blockIdx.x - before)) * BLOCK_M);
        __syncthreads();
    }
    return carry > blockIdx.x;
}

// Brings passes of keys and values. A warp fetches 16 tokens' rows; lane i < 16 knows where the i-th lies.
struct Loader {
    static constexpr int PIECES = HEAD_DIM * ESIZE / 16;      // of a row in memory
    static constexpr int SHARE = PIECES > 32 ? 1 : 32 / PIECES;  // rows that a warp fetches at once
    const AttentionArgs& a;
    const Item& item;
    u32 warp, lane;
    u32 page;  // of this lane's token in the next pass to be loaded

    DEVICE u32 row_of(u32 i) const { return SCALED ? warp * 16 + i : i / SHARE * (SHARE * WARPS) + warp * SHARE + i % SHARE; }

    DEVICE void look_up(u32 pass) {
        const u32 position = pass * BLOCK_N + row_of(lane % 16);
        const u32* table = a.table + (u64)a.seat[item.row] * a.table_stride;
        page = position >= item.begin && position < item.end ? a.page(table[position / a.page_size]) : 0;
    }

    DEVICE void load(u32 pass, u32 target) {
        const u32 position = pass * BLOCK_N + row_of(lane % 16);
        const bool inside = position >= item.begin && position < item.end;
        const i64 offset = (page * a.page_stride + position % a.page_size * a.slot_stride + blockIdx.y * a.head_stride) * ESIZE;
        const char* k = (const char*)a.k;
        const char* v = (const char*)a.v;
        look_up(pass + 1);
        if constexpr (SCALED) {
            const bool runs = a.slot_stride == RAW_ROW && a.page_size % 16 == 0 && a.runs_are_aligned();
            if (runs && __all_sync(~0u, inside)) {
                const i64 from = __shfl_sync(~0u, offset, 0);
                const u32 to = target + warp * 16 * RAW_ROW;
#pragma unroll 1
                for (u32 piece = lane; piece < RAW_ROW; piece += 32) {
                    copy_async16(to + piece * 16, k + from + piece * 16);
                    copy_async16(to + RAW_HALF + piece * 16, v + from + piece * 16);
                }
                copy_async_commit();
                return;
            }
            // Rows at any word, or not all of the stream: no copy of 16 bytes will do.
            constexpr u32 WORDS = RAW_ROW / 4;
#pragma unroll 1
            for (u32 first = 0; first < 16 * WORDS; first += 32) {
                const u32 i = first + lane, source = i / WORDS, at = i % WORDS * 4;
                const i64 from = __shfl_sync(~0u, offset, source % 16) + at;
                const u32 bytes = __shfl_sync(~0u, inside, source % 16) ? 4 : 0;
                if (source >= 16) continue;
                const u32 to = target + row_of(source) * RAW_ROW + at;
                copy_async4(to, bytes ? k + from : k, bytes);
                copy_async4(to + RAW_HALF, bytes ? v + from : v, bytes);
            }
            copy_async_commit();
            return;
        }
#pragma unroll
        for (int i = 0; i < 16; i += SHARE) {
            const u32 source = i + lane / PIECES % SHARE, piece = lane % PIECES;
            const i64 from = __shfl_sync(~0u, offset, source) + piece * 16;
            const u32 bytes = __shfl_sync(~0u, inside, source) ? 16 : 0;
            const u32 row = row_of(source);
            const u32 to = target + (ESIZE == 2 ? swizzled(row, piece) : row * HEAD_DIM + piece * 16);
            copy_async16(to, bytes ? k + from : k, bytes);
            copy_async16(to + (ESIZE == 2 ? TILE : RAW_HALF), bytes ? v + from : v, bytes);
        }
        copy_async_commit();
    }
};

// So many rows of 8-bit keys or values to 16 bits.
template <bool VALUES, int ROWS> DEVICE void widen(u32 from, u32 to) {
    for (u32 i = threadIdx.x; i < ROWS * HEAD_DIM / 16; i += THREADS) {
        const u32 row = i / (HEAD_DIM / 16), piece = i % (HEAD_DIM / 16) * 2;
        Word4 w;
        if constexpr (SCALED) {
            const u32 at = from + row * RAW_ROW + piece * 8;
            w = {load_shared1(at), load_shared1(at + 4), load_shared1(at + 8), load_shared1(at + 12)};
        } else {
            w = load_shared4(from + i * 16);
        }
        const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 wide[4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 x = words[2 * h + j];
                wide[2 * j] = VALUES ? widen_values<0>(x) : widen_keys<0>(x);
                wide[2 * j + 1] = VALUES ? widen_values<1>(x) : widen_keys<1>(x);
            }
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + swizzled(row, piece + h)), "r"(wide[0]), "r"(wide[1]),
                         "r"(wide[2]), "r"(wide[3]) : "memory");
        }
    }
}

// Multiplies what this lane has of the n-th eight tokens with their scales.
DEVICE void scale_pair(float (&score)[ROW_TILES][N_TILES][4], int n, u32 scales) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float scale = __uint_as_float(load_shared1(scales + (n * 8 + i) * RAW_ROW));
#pragma unroll
        for (int w = 0; w < ROW_TILES; w++) score[w][n][i] *= scale, score[w][n][i + 2] *= scale;
    }
}

DEVICE float max_over_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float sum_over_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM == 256 ? 1 : 2)
attention_prefill(const __grid_constant__ AttentionArgs a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ Item item;
    if (!find_item(a, item)) return;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const u32 shared = shared_address(memory), head = blockIdx.y;
    const u32 first_pass = item.begin / BLOCK_N;
    Loader loader = {a, item, warp, lane, 0};
    loader.look_up(first_pass);
    loader.load(first_pass, shared + (ESIZE == 2 ? QUERIES : RAW));

    for (u32 i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 8; i += THREADS) {
        const u32 row = i / (HEAD_DIM / 8), piece = i % (HEAD_DIM / 8), query = item.first + row;
        Float4 x = {0.f, 0.f, 0.f, 0.f}, y = x;
        if (query < item.queries) {
            const QElement* q = (const QElement*)a.q + ((i64)a.token_start[item.row] + query / a.group) * a.q_stride
                                + (head * a.group + query % a.group) * HEAD_DIM + piece * 8;
            x = load_q4(q), y = load_q4(q + 4);
        }
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared + swizzled(row, piece)), "r"(pack_half(x.x, x.y)),
                     "r"(pack_half(x.z, x.w)), "r"(pack_half(y.x, y.y)), "r"(pack_half(y.z, y.w)) : "memory");
    }

    // Lane 4g+c has rows g and g+8 of each row tile; row 2w+h below is row g+8h of tile w.
    float maximum[2 * ROW_TILES], weight = 0.f;  // weight: of the row whose number is c
    float sum[ROW_TILES][D_TILES][4];
#pragma unroll
    for (int r = 0; r < 2 * ROW_TILES; r++) {
        maximum[r] = MINUS_INF;
    }
#pragma unroll
    for (int w = 0; w < ROW_TILES; w++)
#pragma unroll
        for (int d = 0; d < D_TILES; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[w][d][i] = 0.f;

    // Where a lane's ldmatrix row begins; a piece further on is an exclusive or away, whatever the row.
    const u32 query_at = swizzled(warp * ROW_TILES * 16 + lane % 16, lane / 16);
    const u32 key_at = swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2), value_at = swizzled(lane % 16, lane / 16);

#pragma unroll 1
    for (u32 from = first_pass * BLOCK_N, turn = 0; from < item.end; from += BLOCK_N, turn ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        const bool more = from + BLOCK_N < item.end;
        u32 keys = shared + QUERIES;
        if constexpr (ESIZE == 2) {
            keys += turn * 2 * TILE;
            if (more) loader.load(from / BLOCK_N + 1, shared + QUERIES + (turn ^ 1) * 2 * TILE);
        } else {
            if (more) loader.load(from / BLOCK_N + 1, shared + RAW + (turn ^ 1) * 2 * RAW_HALF);
            const u32 raw = shared + RAW + turn * 2 * RAW_HALF;
            if constexpr (SCALED) widen<false, BLOCK_N>(raw, keys), widen<true, BLOCK_N>(raw + RAW_HALF, keys + TILE);
            else widen<false, 2 * BLOCK_N>(raw, keys);
            __syncthreads();
        }

        float score[ROW_TILES][N_TILES][4];
#pragma unroll
        for (int w = 0; w < ROW_TILES; w++)
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) score[w][n][i] = 0.f;
#pragma unroll
        for (int s = 0; s < K_STEPS; s++) {
            u32 q[ROW_TILES][4];
#pragma unroll
            for (int w = 0; w < ROW_TILES; w++) ldmatrix4(q[w], shared + (query_at ^ 32 * s) + 16 * w * ROW);
#pragma unroll
            for (int n = 0; n < N_TILES; n += 2) {
                u32 k[4];
                ldmatrix4(k, keys + (key_at ^ 32 * s) + n * 8 * ROW);
#pragma unroll
                for (int w = 0; w < ROW_TILES; w++) {
                    mma_keys(score[w][n], q[w][0], q[w][1], q[w][2], q[w][3], k[0], k[1]);
                    mma_keys(score[w][n + 1], q[w][0], q[w][1], q[w][2], q[w][3], k[2], k[3]);
                }
            }
        }

        // Scales lie behind the rows as they came.
        const u32 scales = shared + RAW + turn * 2 * RAW_HALF + 2 * c * RAW_ROW + HEAD_DIM;
        if constexpr (SCALED)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) scale_pair(score, n, scales);

        const float raw_scale2 = a.scale * a.k_scale * LOG2E, scale2 = a.softcap != 0.f ? 1.f : raw_scale2;
        if (a.softcap != 0.f)
#pragma unroll
            for (int w = 0; w < ROW_TILES; w++)
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) score[w][n][i] = logit2(score[w][n][i], raw_scale2, a.softcap);
        if (from < item.plain_from || from + BLOCK_N > item.plain_to)
#pragma unroll
            for (int r = 0; r < 2 * ROW_TILES; r++) {
                const u32 query = item.first + (warp * ROW_TILES + r / 2) * 16 + g + r % 2 * 8;
                const u32 above = a.causal ? min(item.start + query / a.group + 1, item.len) : item.len;
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const u32 position = from + n * 8 + 2 * c + i;
                        if (position >= above || (a.window && position + a.window < above)) score[r / 2][n][r % 2 * 2 + i] = MINUS_INF;
                    }
            }

#pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; r++) {
            float top = maximum[r];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) top = fmaxf(top, fmaxf(score[r / 2][n][r % 2 * 2], score[r / 2][n][r % 2 * 2 + 1]));
            top = max_over_quad(top);
            const float seen = top == MINUS_INF ? 0.f : top;  // a row that has seen nothing yet
            // Exactly 1 where the maximum stays, so that a pass of which a token sees nothing changes no bit: how many of
            // those there are depends on the token's neighbours in the block. Scaled first, the two would differ by a rounding.
            const float shrink = exp2_approx((maximum[r] - seen) * scale2), base = seen * scale2;
            maximum[r] = top;
            float added = 0.f;
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = score[r / 2][n][r % 2 * 2 + i];
                    x = exp2_approx(x * scale2 - base);
                    added += x;
                }
            added = sum_over_quad(added);
            if (c == r) weight = weight * shrink + added;
#pragma unroll
            for (int d = 0; d < D_TILES; d++) sum[r / 2][d][r % 2 * 2] *= shrink, sum[r / 2][d][r % 2 * 2 + 1] *= shrink;
        }

        if constexpr (SCALED)
#pragma unroll
            for (int n = 0; n < N_TILES; n++) scale_pair(score, n, scales + RAW_HALF);
        const u32 values = keys + TILE;
#pragma unroll
        for (int s = 0; s < BLOCK_N / 16; s++) {
            u32 p[ROW_TILES][4];
#pragma unroll
            for (int w = 0; w < ROW_TILES; w++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[w][i] = pack_weights(score[w][2 * s + i / 2][i % 2 * 2], score[w][2 * s + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int d = 0; d < D_TILES; d += 2) {
                u32 v[4];
                ldmatrix4_transposed(v, values + (value_at ^ 16 * d) + s * 16 * ROW);
#pragma unroll
                for (int w = 0; w < ROW_TILES; w++) {
                    mma_values(sum[w][d], p[w][0], p[w][1], p[w][2], p[w][3], v[0], v[1]);
                    mma_values(sum[w][d + 1], p[w][0], p[w][1], p[w][2], p[w][3], v[2], v[3]);
                }
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2 * ROW_TILES; r++) {
        const u32 query = item.first + (warp * ROW_TILES + r / 2) * 16 + g + r % 2 * 8;
        const float total = __shfl_sync(~0u, weight, lane / 4 * 4 + r), f = total > 0.f ? a.v_scale / total : 0.f;
        if (query >= item.queries) continue;
        QElement* out = (QElement*)a.out + ((i64)a.token_start[item.row] + query / a.group) * a.out_stride
                        + (head * a.group + query % a.group) * HEAD_DIM + 2 * c;
#pragma unroll
        for (int d = 0; d < D_TILES; d++) store_out2(out + d * 8, sum[r / 2][d][r % 2 * 2] * f, sum[r / 2][d][r % 2 * 2 + 1] * f);
    }
}
