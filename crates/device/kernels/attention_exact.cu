// Paged attention in f32 arithmetic, any rows: the yardstick of the fast kernels, and the only one for f32 caches.
//
//   extern "C" __global__ void attention_exact(AttentionArgs args)
//
// Rows taken: span >= 1. KV_TYPE: all. HEAD_DIM: any multiple of 4 up to 256. group: any. page_size: any.
// Products and sums in f32 (no tensor cores, no tf32); relative error about 1e-6 on f32 caches.
//
// Launch: grid (tokens, kv_heads * group, 1), `tokens` a bound; block (128, 1, 1); no dynamic shared memory.
// Workspace: none. Deterministic and batch invariant.

#include "attention.cuh"
#include "mma.cuh"

constexpr int WARPS = 4;
constexpr int OWN = (HEAD_DIM + 31) / 32;  // elements of the head that a lane sums: lane, lane + 32, ...

#if KV_TYPE == KV_F32
typedef float Element;
DEVICE float to_float(Element x) { return x; }
#elif KV_TYPE == KV_BF16
typedef u16 Element;
DEVICE float to_float(Element x) { return bf16_to_float(x); }
#elif KV_TYPE == KV_F16
typedef u16 Element;
DEVICE float to_float(Element x) { return f16_to_float(x); }
#elif KV_TYPE == KV_I8
typedef signed char Element;
DEVICE float to_float(Element x) { return (float)x; }
#else
typedef unsigned char Element;
DEVICE float to_float(Element x) { return f16_to_float(e4m3x2_to_f16x2(x) & 0xffff); }
#endif
// The scale behind a row.
DEVICE float scale_of(const Element* row) {
#if KV_TYPE == KV_I8
    return *(const float*)(row + HEAD_DIM);
#else
    return 1.f;
#endif
}
struct alignas(4 * sizeof(Element)) Elements4 { Element x, y, z, w; };

DEVICE float max_over_warp(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
DEVICE float sum_over_warp(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) attention_exact(const __grid_constant__ AttentionArgs a) {
    __shared__ Float4 query[HEAD_DIM / 4];
    __shared__ float sums[WARPS][HEAD_DIM], maxima[WARPS], weights[WARPS];
    __shared__ u32 found;
    const u32 token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) found = ~0u;
    __syncthreads();
    for (u32 row = threadIdx.x; row < a.rows; row += 32 * WARPS)
        if (token - a.token_start[row] < a.span[row] && a.has(row, a.span[row])) found = row;
    const QElement* q = (const QElement*)a.q + (i64)token * a.q_stride + head * HEAD_DIM;
    __syncthreads();
    const u32 row = found;
    if (row == ~0u) return;
    for (u32 i = threadIdx.x; i < HEAD_DIM / 4; i += 32 * WARPS) query[i] = load_q4(q + 4 * i);
    __syncthreads();

    const u32 len = a.length(row), next = len - a.span[row] + (token - a.token_start[row]) + 1;
    const u32 end = a.causal ? min(next, len) : len, begin = a.window && next > a.window ? next - a.window : 0;
    const Element* k = (const Element*)a.k + head / a.group * a.head_stride;
    const Element* v = (const Element*)a.v + head / a.group * a.head_stride;
    const u32* table = a.table + (u64)a.seat[row] * a.table_stride;
    const float scale2 = a.scale * a.k_scale * LOG2E;

    float maximum = MINUS_INF, weight = 0.f, sum[OWN] = {};
    for (u32 from = begin + warp * 32; from < end; from += 32 * WARPS) {
        const u32 position = from + lane;
        i64 offset = 0;
        float score = MINUS_INF;
        if (position < end) {
            offset = a.page(table[position / a.page_size]) * a.page_stride + position % a.page_size * a.slot_stride;
            float product = 0.f;
#pragma unroll 4
            for (u32 i = 0; i < HEAD_DIM / 4; i++) {
                Elements4 x = *(const Elements4*)(k + offset + 4 * i);
                Float4 y = query[i];
                product += to_float(x.x) * y.x + to_float(x.y) * y.y + to_float(x.z) * y.z + to_float(x.w) * y.w;
            }
            score = logit2(product * scale_of(k + offset), scale2, a.softcap);
        }
        const float top = fmaxf(maximum, max_over_warp(score)), shrink = exp2f(maximum - top), p = exp2f(score - top);
        maximum = top;
        weight = weight * shrink + p;
        for (int i = 0; i < OWN; i++) sum[i] *= shrink;
#if KV_TYPE == KV_I8
        const float scaled = position < end ? p * scale_of(v + offset) : 0.f;
#else
        const float scaled = p;
#endif
#pragma unroll 2
        for (u32 t = 0; t < min(32u, end - from); t++) {
            const float share = __shfl_sync(~0u, scaled, t);
            const Element* value = v + __shfl_sync(~0u, offset, t);
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (HEAD_DIM % 32 == 0 || lane + 32 * i < HEAD_DIM) sum[i] += share * to_float(value[lane + 32 * i]);
        }
    }
    weight = sum_over_warp(weight);
    if (lane == 0) maxima[warp] = maximum, weights[warp] = weight;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (lane + 32 * i < HEAD_DIM) sums[warp][lane + 32 * i] = sum[i];
    __syncthreads();

    float top = MINUS_INF, total = 0.f, factor[WARPS];
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, maxima[w]);
    for (int w = 0; w < WARPS; w++) {
        factor[w] = maxima[w] == MINUS_INF ? 0.f : exp2f(maxima[w] - top);
        total += factor[w] * weights[w];
    }
    QElement* out = (QElement*)a.out + (i64)token * a.out_stride + head * HEAD_DIM;
    for (u32 i = 2 * threadIdx.x; i < HEAD_DIM; i += 64 * WARPS) {
        float x = 0.f, y = 0.f;
        for (int w = 0; w < WARPS; w++) x += factor[w] * sums[w][i], y += factor[w] * sums[w][i + 1];
        const float f = total > 0.f ? a.v_scale / total : 0.f;
        store_out2(out + i, x * f, y * f);
    }
}
