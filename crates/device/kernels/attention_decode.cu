// Paged attention of one query token per row ("decode"), split over the context.
//
//   extern "C" __global__ void attention_decode(AttentionArgs args)
//
// Macros beside those of attention.cuh:
//   -D GROUP_TILE=8 | 16     the smaller one that is >= group
//   -D WARPS, -D STAGES      warps per block and tiles in flight per warp. Defaults, from ROW = HEAD_DIM * element size:
//                              ROW 512: WARPS 4, STAGES 3    ROW 128: WARPS 12, STAGES 4 (GROUP_TILE 16: 8, 6)
//                              ROW 256: WARPS 8, STAGES 3    ROW  64: WARPS 12, STAGES 7 (GROUP_TILE 16: 8, 8)
//                            sized for the 227 KiB of sm_90 and sm_100. Where less is there, take stages away down
//                            to 2, then warps.
//
// Rows taken: span == 1. A row of len 0 gets 0.
//
// Launch: grid (G, 1, 1), G = processors of the device (any G is right; this one is fast);
//         block (32 * WARPS, 1, 1);
//         dynamic shared memory, bytes:
//           WARPS * STAGES * (2 * (16 * ROW + 128) + 8) + WARPS * (GROUP_TILE * 8 + 1024) + 4 * (rows + 1) + 512
//           and 8192 more for HEAD_DIM 256 with GROUP_TILE 16,
//         with `rows` of the arguments; set the function's limit to the largest that will be used.
//         May be launched with programmatic stream serialization (sm_90 and later): it then begins before the kernel in
//         front of it has ended, and until that end reads no more than span, len, seat, token_start and table, which
//         that kernel must therefore not write. The kernel behind may be launched so as well.
// Workspace: chunk == 0: counter 4 * (8 * G + 2) bytes, partial 16 * G * P bytes;
//            chunk > 0:  counter 4 * (rows * kv_heads + 2) bytes, partial rows * kv_heads * ceil(max_len / chunk) * P bytes;
//            P = 4 * GROUP_TILE * (HEAD_DIM + 2). Streams need workspaces of their own.
//            (Both are bounds with room for what is in flight to change; today's kernel uses less.)
//
// Deterministic: the same arguments and G give the same bits. With chunk > 0 a row's bits depend on its own
// query, keys, values and len alone, whatever the batch and G.

#include "decode_load.cuh"
#include "decode_parts.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_decode(const __grid_constant__ AttentionArgs a) {
    extern __shared__ __align__(128) char memory[];
    KERNEL_BEHIND_MAY_BEGIN();
    u64* barrier_memory = (u64*)(memory + WARPS * STAGES * STAGE + QUERY_BYTES);
    Shared& shared = *(Shared*)(barrier_memory + (WARPS * STAGES + 1) / 2 * 2);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 barriers = shared_address(barrier_memory + warp * STAGES);
    const u32 stages = shared_address(memory) + warp * STAGES * STAGE;
    if (lane < STAGES) barrier_init(barriers + lane * 8);
    if (threadIdx.x < 2) shared.split[threadIdx.x].units = 0;
    async_proxy_fence();
    Work work = {a, shared.before, shared.deal};
    const bool empty = count_units(work, shared);
    Segment segment = {};
    bool works = work.deal.total && blockIdx.x < work.deal.blocks;
    if (works) segment = work.first(), works = segment.unit < work.deal.end;
    Loader loader = {work, segment, segment.first + warp, 0, 0, warp, lane, stages, barriers,
                     a.slot_stride == ROW / ESIZE && a.page_size % TILE == 0 && (!SCALED || a.runs_are_aligned())};
    if (works && loader.runs) loader.look_up();
    AFTER_KERNEL_BEFORE();

    if (empty)
        for (u32 row = blockIdx.x; row < a.rows; row += gridDim.x)
            if (a.span[row] == 1 && a.len[row] == 0 && a.has(row, 1)) {
                QElement* out = (QElement*)a.out + (i64)a.token_start[row] * a.out_stride;
                for (u32 i = threadIdx.x; i < a.kv_heads * a.group * HEAD_DIM / 2; i += THREADS) store_out2(out + 2 * i, 0.f, 0.f);
            }
    if (!works) return;
    Query query;
    query.shared = shared_address(memory + WARPS * STAGES * STAGE), query.lane = lane;
    query.load(a, segment.row, segment.head);
    Accumulator acc;
    acc.clear();
    const float scale2 = a.scale * a.k_scale * LOG2E;
    u32 len = a.length(segment.row), begin = work.begin_token(len), tile = segment.first + warp;
    u32 filled = 0, free = STAGES;    // stages: next to be filled, how many may be
    u32 stage = 0, parity = 0;        // next to be read
    bool parts_written = false, whole = true, fresh = true;
    u32 mine = 0;                     // number of this block's part of the segment's stream, if not whole
    while (true) {
        while (free && loader.find()) {
            loader.load(filled);
            filled = filled + 1 == STAGES ? 0 : filled + 1;
            free--;
        }
        if (fresh) {  // after the loads were begun, since none of this is needed soon
            fresh = false, whole = work.whole(segment);
            if (!whole) {
                const Parts parts(work, segment);
                mine = parts.mine;
                if (threadIdx.x == 0) {
                    const u32 later = segment.unit != work.deal.begin;
                    shared.split[later] = segment, shared.split_parts[later] = parts;
                }
            }
        }
        const bool used = tile < segment.end;
        if (used) {
            barrier_wait(barriers + stage * 8, parity);
            attend_tile(acc, query, stages + stage * STAGE, tile, begin, len, scale2, a.softcap, lane);
            __syncwarp();
            tile += WARPS;
            if (tile < segment.end) {
                free++;
                if (++stage == STAGES) stage = 0, parity ^= 1;
                continue;
            }
        }

        // The segment is over for this warp: its sums go where its last tile was, and the warps' sums together.
        QElement* out = (QElement*)a.out + (i64)a.token_start[segment.row] * a.out_stride + (i64)segment.head * a.group * HEAD_DIM;
        float* part = a.partial + (u64)mine * PARTIAL;
        const u32 sums = stages + stage * STAGE;  // without a tile: whatever lies there, with weight 0
        if (lane == 0) shared.sums[warp] = sums;
#pragma unroll
        for (int t = 0; t < QUERY_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float weight = sum_over_rows(acc.weight[t][i]);
                if (lane < 4) shared.weight[warp][t * 8 + lane * 2 + i] = {acc.maximum[t][i], weight};
            }
            if (used)
#pragma unroll
                for (int d = 0; d < DIM_TILES; d++)
                    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(sums + (d * 32 + lane) * 16),
                                 "f"(acc.sum[d][t][0]), "f"(acc.sum[d][t][1]), "f"(acc.sum[d][t][2]), "f"(acc.sum[d][t][3]) : "memory");
            __syncthreads();
            const u32 member = t * 8 + lane % 4 * 2;
            Float4 each[WARPS];  // maximum and weight of this lane's two queries
            float maximum[2] = {MINUS_INF, MINUS_INF}, weight[2] = {0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                each[w] = *(const Float4*)&shared.weight[w][member];
                maximum[0] = fmaxf(maximum[0], each[w].x), maximum[1] = fmaxf(maximum[1], each[w].z);
            }
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                each[w].x = exp2_approx(each[w].x - maximum[0]), each[w].z = exp2_approx(each[w].z - maximum[1]);
                weight[0] += each[w].x * each[w].y, weight[1] += each[w].z * each[w].w;
            }
            const float f[2] = {__fdividef(a.v_scale, weight[0]), __fdividef(a.v_scale, weight[1])};
#pragma unroll 1
            for (u32 d = warp; d < DIM_TILES; d += WARPS) {
                float x[4] = {0.f, 0.f, 0.f, 0.f};
                Word4 y[WARPS];
#pragma unroll
                for (int w = 0; w < WARPS; w++) y[w] = load_shared4(shared.sums[w] + (d * 32 + lane) * 16);
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    if (each[w].y > 0.f) {  // every warp with a tile has weight for every query
                        x[0] += each[w].x * __uint_as_float(y[w].x), x[1] += each[w].z * __uint_as_float(y[w].y);
                        x[2] += each[w].x * __uint_as_float(y[w].z), x[3] += each[w].z * __uint_as_float(y[w].w);
                    }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (member + i >= a.group) continue;
                    const u32 at = (member + i) * HEAD_DIM + value_dim(d, lane / 4);
                    if (whole) store_out2(out + at, x[i] * f[i], x[i + 2] * f[i]);
                    else *(Float2*)(part + at) = {x[i], x[i + 2]};
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
        if (used) {
            free++;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }

        parts_written |= !whole;
        segment = work.after(segment);
        if (segment.unit >= work.deal.end) break;
        fresh = true;
        query.load(a, segment.row, segment.head);
        acc.clear();
        len = a.length(segment.row), begin = work.begin_token(len), tile = segment.first + warp;
    }
    if (parts_written) finish(work, shared.split, shared.split_parts, (u32*)memory);
}
