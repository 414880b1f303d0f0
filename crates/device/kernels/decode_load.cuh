// attention_decode: how keys and values come into shared memory.
#pragma once
#include "decode_work.cuh"

#ifndef COPY_ENGINE
#define COPY_ENGINE (__CUDA_ARCH__ >= 900)  // bulk copies; otherwise 16 bytes at a time
#endif

// A stage's barrier completes when its bytes are there: counted by the copy engine, or by the lanes.
#if COPY_ENGINE
constexpr int ARRIVALS = 1;
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
// Between ordinary accesses to shared memory and the copy engine's that follow.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
constexpr int ARRIVALS = 32;
DEVICE void copy_async_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void async_proxy_fence() {}
#endif

DEVICE void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(ARRIVALS) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#endif
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

// Brings the tiles of one warp ahead of their use: tiles warp, warp + WARPS, ... of every segment of the block.
struct Loader {
    const Work& work;
    Segment at;
    u32 tile;        // next to be loaded
    u32 held;        // tiles whose offsets the lanes hold, from `tile` on
    i64 offset;      // lane i: element offset of the i-th of them
    u32 warp, lane, stages, barriers;  // shared addresses of this warp's stages and barriers
    bool runs;       // the tokens of a tile lie together in memory

    // Whether there is another tile to load.
    DEVICE bool find() {
        while (at.unit < work.deal.end) {
            if (tile < at.end) return true;
            at = work.after(at);
            tile = at.first + warp, held = 0;
        }
        return false;
    }

    DEVICE i64 token_element(u32 position) const {
        const AttentionArgs& a = work.a;
        u32 index = divide(position, a.page_size);
        u32 page = a.table[(u64)a.seat[at.row] * a.table_stride + index];
        return page * a.page_stride + (position - index * a.page_size) * a.slot_stride + at.head * a.head_stride;
    }

    // Where this lane's tile lies, of the next 32.
    DEVICE void look_up() {
        const u32 mine = tile + lane * WARPS;
        if (mine < at.end) offset = token_element(mine * TILE);
        held = 32;
    }

    // Begins to bring the tile that find() found.
    DEVICE void load(u32 stage) {
        const u32 target = stages + stage * STAGE, barrier = barriers + stage * 8;
        const char* k = (const char*)work.a.k;
        const char* v = (const char*)work.a.v;
#if COPY_ENGINE
        if (runs) {
            if (!held) look_up();
            i64 bytes = __shfl_sync(~0u, offset, 32 - held) * ESIZE;
            held--;
            if (lane == 0) barrier_expect(barrier, STAGE);
            if (lane < 2) copy_bulk(target + lane * HALF, (lane ? v : k) + bytes, HALF, barrier);
            tile += WARPS;
            return;
        }
#endif
        // Token by token; what is not in the stream isn't read.
        u32 token = lane % 16, len = work.a.len[at.row], position = tile * TILE + token;
        bool inside = position < len && position >= work.begin_token(len);
        i64 bytes = inside ? token_element(position) * ESIZE : 0;
#if COPY_ENGINE
        u32 count = __popc(__ballot_sync(~0u, inside));
        if (lane == 0) barrier_expect(barrier, count * ROW);
        if (inside) copy_bulk(target + lane / 16 * HALF + token * ROW, (lane < 16 ? k : v) + bytes, ROW, barrier);
#else
        constexpr int PIECES = ROW / 16;
        for (u32 i = lane; i < TILE * PIECES; i += 32) {
            i64 from = __shfl_sync(~0u, bytes, i / PIECES) + i % PIECES * 16;
            u32 size = __shfl_sync(~0u, inside, i / PIECES) ? 16 : 0;
            copy_async16(target + i * 16, k + from, size);
            copy_async16(target + i * 16 + HALF, v + from, size);
        }
        copy_async_arrive(barrier);
#endif
        tile += WARPS;
    }
};
