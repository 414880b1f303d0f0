// attention_decode: who does what. Every block works out its share from the rows' lengths.
#pragma once
#include "decode_tile.cuh"

// A run of tiles of one row and head, whole or part of the stream.
struct Segment {
    u32 row, head;
    u32 unit;         // first unit
    u32 units;        // units taken
    u32 first, end;   // tiles, counted from the start of the stream
};

// Units are tiles (chunk == 0) or chunks, numbered through rows, heads of a row and tiles of a head. A block takes
// consecutive units, its range. Where ranges end depends on the lengths and the grid only, and so do the results.
// How units are dealt to blocks. In shared memory, as registers are wanted for other things.
struct Deal {
    u32 gap;             // units at the end of every stream that are none
    u32 total;           // units, gaps included
    u32 blocks;          // that take part
    u32 split;           // 0, or: all streams are equal, and each is dealt to `split` blocks
    u32 stream;          // units of each, then
    u32 share, extra;    // otherwise ranges have `share` units, the first `extra` of them one more
    u32 begin, end;      // units of this block's range
};

struct Work {
    // Between streams of unequal lengths lie units of no work, about what ending a stream costs.
    static constexpr u32 GAP = WARPS;

    const AttentionArgs& a;
    const u32* before;   // [rows + 1] units per head of all rows before, gaps included
    Deal& deal;

    DEVICE u32 chunk_tiles() const { return a.chunk / TILE; }
    DEVICE u32 begin_token(u32 len) const { return a.window && len > a.window ? len - a.window : 0; }

    // Units of a stream, without the gap.
    DEVICE u32 stream_units(u32 len) const {
        u32 tiles = (len + TILE - 1) / TILE - begin_token(len) / TILE;
        return chunk_tiles() ? (tiles + chunk_tiles() - 1) / chunk_tiles() : tiles;
    }

    // Deals `streams` streams, of `most` units each if they are equal, to the blocks of the grid.
    DEVICE void cut(u32 streams, u32 most) {
        const u32 total = deal.total, gap = deal.gap;
        u32 split = 0;
        // A block with fewer tiles than warps would only add parts, unless it has a stream to itself.
        u32 blocks = min(gridDim.x, chunk_tiles() ? total : max((total + WARPS - 1) / WARPS, streams));
        if (!chunk_tiles() && !gap && streams <= blocks) {
            // Many parts take long to put together: above 16 only if they are long themselves.
            const u32 most_parts = max(16u, most / (4 * WARPS)), fair = divide(blocks, streams);
            split = min(fair, most_parts);
            if (split == fair && split * streams * 16 < blocks * 15) split = 0;
            // To put parts together takes longer than a block takes for a tile or two a warp.
            if (most <= 2 * WARPS) split = 1;
        }
        if (split) {
            blocks = split * streams;
            const u32 index = divide(blockIdx.x, split), part = blockIdx.x - index * split;
            deal.begin = index * most + divide(part * most, split), deal.end = index * most + divide((part + 1) * most, split);
        } else {
            const u32 share = divide(total, blocks), extra = total - share * blocks;
            deal.share = share, deal.extra = extra;
            deal.begin = blockIdx.x * share + min(blockIdx.x, extra);
            deal.end = (blockIdx.x + 1) * share + min(blockIdx.x + 1, extra);
        }
        deal.blocks = blocks, deal.split = split, deal.stream = most;
    }

    DEVICE u32 range_begin(u32 block) const {
        if (deal.split) {
            const u32 index = divide(block, deal.split);
            return index * deal.stream + divide((block - index * deal.split) * deal.stream, deal.split);
        }
        return block * deal.share + min(block, deal.extra);
    }

    DEVICE u32 range_of(u32 unit) const {
        if (deal.split) {
            const u32 index = divide(unit, deal.stream);
            return index * deal.split + divide((unit - index * deal.stream + 1) * deal.split - 1, deal.stream);
        }
        const u32 longer = deal.extra * (deal.share + 1);
        return unit < longer ? divide(unit, deal.share + 1) : deal.extra + divide(unit - longer, deal.share);
    }

    DEVICE Segment first() const {
        u32 low = 0, high = a.rows;  // before[low] <= deal.begin < before[high], times heads
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            if (before[middle] * a.kv_heads <= deal.begin) low = middle;
            else high = middle;
        }
        return at(deal.begin, low);
    }

    // Whether nothing of the stream is in another segment.
    DEVICE bool whole(const Segment& s) const { return s.units == before[s.row + 1] - before[s.row] - deal.gap; }

    DEVICE Segment after(const Segment& s) const { return at(s.unit + s.units, s.row); }

    // The block's segment that begins at `unit`, in `row` or behind it; its unit is `deal.end` or above when there is none.
    DEVICE Segment at(u32 unit, u32 row) const {
        Segment s = {row, 0, unit};
        while (s.unit < deal.end) {
            while (s.unit >= before[s.row + 1] * a.kv_heads) s.row++;
            const u32 from = before[s.row] * a.kv_heads, per_head = before[s.row + 1] - before[s.row], units = per_head - deal.gap;
            s.head = divide(s.unit - from, per_head);
            const u32 offset = s.unit - from - s.head * per_head;
            if (offset >= units) {
                s.unit += per_head - offset;
                continue;
            }
            const u32 len = a.length(s.row), last = (len + TILE - 1) / TILE;
            s.first = begin_token(len) / TILE;
            if (chunk_tiles()) {
                s.units = 1, s.first += offset * chunk_tiles(), s.end = min(s.first + chunk_tiles(), last);
            } else {
                s.units = min(units - offset, deal.end - s.unit), s.first += offset, s.end = s.first + s.units;
            }
            break;
        }
        return s;
    }
};

// The parts of one row and head, each written by the block that had its range: see decode_parts.cuh.
struct PartNumbers {
    u32 count, counter, first, mine;
};

// Shared memory of one block beside the stages.
struct Shared {
    Float2 weight[WARPS][GROUP_TILE];  // maximum and weight of each warp's share of a segment
    u32 sums[WARPS];                   // shared address of that share's sums
    u32 scan[WARPS][3];
    Deal deal;
    PartNumbers split_parts[2];
    Segment split[2];                  // of which other blocks have parts: the first and the last at most, with chunk == 0
    u32 before[1];                     // [rows + 1]
};

// Sums units over rows into shared.before and deals them. Answers whether a row has nothing to read. All threads.
DEVICE bool count_units(Work& work, Shared& shared) {
    const AttentionArgs& a = work.a;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 each = (a.rows + THREADS - 1) / THREADS, first = threadIdx.x * each, end = min(first + each, a.rows);
    u32 own_streams = 0, own_units = 0, most = 0, empty = 0;
    for (u32 row = first; row < end; row++) {
        const u32 len = a.length(row);
        const bool taken = a.span[row] == 1 & a.has(row, 1);
        const u32 units = taken ? work.stream_units(len) : 0;
        shared.before[row + 1] = units;
        most = max(most, units), own_streams += units > 0, own_units += units, empty |= taken && len == 0;
    }
    most = __reduce_max_sync(~0u, most);
    const u32 warp_streams = __reduce_add_sync(~0u, own_streams), warp_units = __reduce_add_sync(~0u, own_units);
    if (lane == 0) shared.scan[warp][0] = most, shared.scan[warp][1] = warp_streams, shared.scan[warp][2] = warp_units;
    if (threadIdx.x == 0) shared.before[0] = 0;
    empty = __syncthreads_or(empty);
    u32 streams = 0, sum = 0, streams_before = 0, units_before = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w == warp) streams_before = streams, units_before = sum;
        most = max(most, shared.scan[w][0]), streams += shared.scan[w][1], sum += shared.scan[w][2];
    }
    const u32 gap = work.chunk_tiles() || most * streams == sum ? 0 : Work::GAP;
    const u32 own = own_units + own_streams * gap;
    u32 running = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, running, step);
        if (lane >= step) running += other;
    }
    running += units_before + streams_before * gap - own;
    for (u32 row = first; row < end; row++) {
        const u32 units = shared.before[row + 1];
        shared.before[row + 1] = running += units ? units + gap : 0;
    }
    if (threadIdx.x == 0) {
        work.deal.gap = gap, work.deal.total = (sum + streams * gap) * a.kv_heads;
        if (work.deal.total) work.cut(streams * a.kv_heads, most);
    }
    __syncthreads();
    return empty;
}
