// attention_decode: putting together what several blocks computed of one row and head.
#pragma once
#include "decode_work.cuh"

constexpr int PARTIAL = GROUP_TILE * (HEAD_DIM + 2);  // floats of a part: sums, then maxima, then weights

struct Parts : PartNumbers {  // mine: of the block that asks
    DEVICE Parts() {}
    DEVICE Parts(const PartNumbers& numbers) : PartNumbers(numbers) {}
    DEVICE Parts(const Work& work, const Segment& s) {
        const u32 per_head = work.before[s.row + 1] - work.before[s.row];
        const u32 begin = work.before[s.row] * work.a.kv_heads + s.head * per_head;
        if (work.chunk_tiles()) {
            count = per_head, counter = s.row * work.a.kv_heads + s.head, first = begin, mine = s.unit;
            return;
        }
        const u32 range = work.range_of(begin);
        count = work.range_of(begin + per_head - work.deal.gap - 1) - range + 1, counter = range;
        // A range has at most two parts of shared streams: 2i for the one it begins with, 2i + 1 for a later one.
        first = 2 * range + (work.range_begin(range) != begin);
        mine = blockIdx.x == range ? first : 2 * blockIdx.x;
    }

    DEVICE float* at(const Work& work, u32 i) const {
        const u32 number = work.chunk_tiles() ? first + i : i == 0 ? first : (first / 2 + i) * 2;
        return work.a.partial + (u64)number * PARTIAL;
    }
};

// Other blocks wrote these: not from this processor's cache.
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

struct Sum {
    float maximum, weight, x, y, z, w;

    DEVICE void add(float m, float share, float ax, float ay, float az, float aw) {
        const float top = fmaxf(maximum, m), f = exp2_approx(maximum - top), h = exp2_approx(m - top);
        maximum = top, weight = weight * f + share * h;
        x = x * f + ax * h, y = y * f + ay * h, z = z * f + az * h, w = w * f + aw * h;
    }
};

// All parts of a row and head into out, in the order of the stream: by `width` threads, of which this is the index-th.
// Only a whole block's may divide the parts of an element among them; then scratch has room for THREADS sums.
DEVICE void combine(const Work& work, const Parts& parts, QElement* out, u32 index, u32 width, Sum* scratch) {
    constexpr u32 BATCH = 10;
    const u32 pieces = work.a.group * (HEAD_DIM / 4);  // quadruples of the answer
    const u32 shares = width == THREADS && pieces <= THREADS / 2 ? THREADS / pieces : 1;
    const u32 share = shares == 1 ? 0 : divide(index, pieces);
    for (u32 from = 0; from < pieces; from += width) {
        const u32 piece = from + index - share * pieces, member = piece / (HEAD_DIM / 4);
        const bool active = piece < pieces && share < shares;
        Sum sum = {MINUS_INF};
        const u32 first = parts.count * share / shares, end = active ? parts.count * (share + 1) / shares : 0;
#pragma unroll 1
        for (u32 i = first; i < end; i += BATCH) {
            float m[BATCH], w[BATCH];
            Float4 x[BATCH];
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) {
                const float* part = parts.at(work, min(i + j, end - 1));
                m[j] = load_l2(part + GROUP_TILE * HEAD_DIM + member);
                w[j] = load_l2(part + GROUP_TILE * (HEAD_DIM + 1) + member);
                x[j] = load_l2((const Float4*)part + piece);
            }
#pragma unroll
            for (u32 j = 0; j < BATCH; j++)
                if (i + j < end) sum.add(m[j], w[j], x[j].x, x[j].y, x[j].z, x[j].w);
        }
        if (shares > 1) {
            scratch[index] = sum;
            __syncthreads();
            if (active && share == 0)
                for (u32 i = 1; i < shares; i++) {
                    const Sum other = scratch[index + i * pieces];
                    if (other.maximum != MINUS_INF) sum.add(other.maximum, other.weight, other.x, other.y, other.z, other.w);
                }
        }
        if (!active || share) continue;
        const float f = __fdividef(work.a.v_scale, sum.weight);
        store_out2(out + piece * 4, sum.x * f, sum.y * f);
        store_out2(out + piece * 4 + 2, sum.z * f, sum.w * f);
    }
    if (index == 0) work.a.counter[parts.counter] = 0;
}

// At the block's end: tells of each part it wrote, and puts together the streams whose last part that was, whichever
// block it is: the order is fixed. All threads, after a barrier behind the last part; `memory` is free shared memory.
DEVICE void finish(const Work& work, const Segment* split, const PartNumbers* split_parts, u32* memory) {
    // With chunks every unit may be a part; otherwise the first and the last segment.
    const bool chunks = work.chunk_tiles();
    const u32 count = chunks ? work.deal.end - work.deal.begin : 2;
    auto segment = [&](u32 i) { return chunks ? work.at(work.deal.begin + i, 0) : split[i]; };
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        const Segment s = segment(i);
        u32 last = 0;
        if (s.units && !work.whole(s)) {
            const Parts parts = chunks ? Parts(work, s) : split_parts[i];
            __threadfence();
            last = atomicAdd(work.a.counter + parts.counter, 1u) == parts.count - 1;
            __threadfence();
        }
        memory[i] = last;
    }
    __syncthreads();
    Sum* scratch = (Sum*)(memory + 2);
    const u32 width = chunks ? 32 : THREADS;
    for (u32 i = threadIdx.x / width; i < count; i += THREADS / width) {
        if (!memory[i]) continue;
        const Segment s = segment(i);
        QElement* out = (QElement*)work.a.out + (i64)work.a.token_start[s.row] * work.a.out_stride
                        + (i64)s.head * work.a.group * HEAD_DIM;
        combine(work, chunks ? Parts(work, s) : split_parts[i], out, threadIdx.x % width, width, scratch);
        if (width == THREADS) __syncthreads();
    }
}
