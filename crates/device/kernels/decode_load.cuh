// attention_decode: how keys and values come into shared memory.
#pragma once
#include "decode_work.cuh"
#include "async_copy.cuh"

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
        u32 page = a.page(a.table[(u64)a.seat[at.row] * a.table_stride + index]);
        return page * a.page_stride + (position - index * a.page_size) * a.slot_stride + at.head * a.head_stride;
    }

    // Where this lane's tile lies, of the next 32.
    DEVICE void look_up() {
        const u32 mine = tile + lane * WARPS;
        if (mine < at.end) offset = token_element(mine * TILE);
        held = 32;
    }

    DEVICE static void store_word(u32 to, const char* from) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(*(const u32*)from) : "memory");
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
        u32 token = lane % 16, len = work.a.length(at.row), position = tile * TILE + token;
        bool inside = position < len && position >= work.begin_token(len);
        i64 bytes = inside ? token_element(position) * ESIZE : 0;
        if (SCALED) {
            // Rows at any word: no copy of 16 bytes is aligned.
            constexpr u32 WORDS = ROW / 4;
            for (u32 first = 0; first < TILE * WORDS; first += 32) {
                const u32 i = first + lane, which = i / WORDS, at = i % WORDS * 4;
                const i64 from = __shfl_sync(~0u, bytes, which % TILE) + at;
                if (which >= TILE) continue;
                store_word(target + which * ROW + at, k + from), store_word(target + HALF + which * ROW + at, v + from);
            }
            __syncwarp();
#if COPY_ENGINE
            if (lane == 0) barrier_expect(barrier, 0);
#else
            copy_async_arrive(barrier);
#endif
            tile += WARPS;
            return;
        }
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
