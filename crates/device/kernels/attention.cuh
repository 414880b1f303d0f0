// What the attention kernels share: their arguments, the names of the element types, small helpers.
//
// No toolkit header is included: NVRTC alone compiles these files. An instance is one .cu file, a list of
// -D macros and an architecture; --std=c++17 is enough.
//
//   -D HEAD_DIM=64 | 128 | 256      elements per head (attention_exact.cu: any multiple of 4 up to 256)
//   -D KV_TYPE=KV_BF16 | KV_F16 | KV_E4M3 | KV_I8 | KV_F32   element type of the cache (KV_F32: attention_exact.cu only)
//   -D Q_TYPE=Q_BF16 | Q_F32        element type of q and of out
//
// Which kernel takes which rows of a step (a row is one stream, see AttentionArgs):
//
//   attention_decode   rows with span == 1; every other row is skipped, its out untouched
//   attention_prefill  rows with span >= min_span (2 beside attention_decode, 1 to take every row)
//   attention_exact    rows with span >= 1, any of them, in f32 arithmetic: for comparison, and for f32 caches
//
// All three read the same AttentionArgs, by value as the only kernel parameter. All may be captured in a graph:
// the launch geometry depends on bounds (rows, tokens, processors) and never on what the columns hold.
//
// Columns and table come from a plan, which another library may have made. Whatever they hold, nothing outside of the
// cache, q, out and the columns is read or written: a row whose seat or tokens there are not is skipped, a page that there
// is not is read as the last one, and a stream longer than its seat's entries is cut to them.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KV_BF16 0
#define KV_F16 1
#define KV_E4M3 2
#define KV_F32 3
#define KV_I8 4  // a row has its scale, a float, behind it: an element stands for itself times that
#define Q_BF16 0
#define Q_F32 1

// Rust: #[repr(C)], the same order; 8-byte fields first, so that there is no padding but the last 4 bytes.
struct AttentionArgs {
    const void* q;           // Q_TYPE [tokens, kv_heads * group, HEAD_DIM], tokens q_stride apart; query heads
                             // h*group .. h*group+group-1 read key/value head h
    void* out;               // Q_TYPE, same shape, tokens out_stride apart; only tokens of rows taken are written
    const void* k;           // the layer's keys: slot s of page p of head h begins at element
    const void* v;           //   p*page_stride + h*head_stride + s*slot_stride; the head's elements are contiguous
    const u32* seat;         // [rows] row of `table`
    const u32* span;         // [rows] query tokens of the row in this step; 0: nothing to do
    const u32* len;          // [rows] tokens of the stream, this step's included; query token j stands at position
                             //   len - span + j. 0 (an empty context): out is 0
    const u32* token_start;  // [rows] first query token of the row in q and out
    const u32* table;        // [seats, table_stride] pages in stream order; entries past ceil(len/page_size) unread
    float* partial;          // attention_decode: workspace, any contents; see attention_decode.cu for its size
    u32* counter;            // attention_decode: workspace, zero before the first launch; every launch leaves it zero
    i64 page_stride;         // strides of the cache in elements. Each must be a multiple of 16 bytes (KV_I8: 4), and so
    i64 head_stride;         //   must k and v themselves
    i64 slot_stride;
    i64 q_stride;            // elements from token to token in q and out: multiples of 8, or q_heads * HEAD_DIM
    i64 out_stride;
    u32 rows;                // rows of the columns (the bucket's bound: rows of span 0 cost nothing)
    u32 tokens;              // tokens of q and out
    u32 kv_heads;
    u32 group;               // query heads per key/value head, 1..=16
    u32 page_size;           // slots per page, any; a multiple of 16 is fast
    u32 table_stride;        // entries per seat; times page_size, below 2^32
    u32 window;              // 0: none. Otherwise (causal only) a query at position p sees positions above p - window
    u32 causal;              // 1: a query at position p sees positions up to p. 0: it sees the whole stream
    u32 min_span;            // attention_prefill: rows of a smaller span are skipped
    u32 chunk;               // attention_decode: 0, or tokens per part of a stream (a multiple of 16) when results
                             //   may depend on nothing but the row: "batch invariant"
    u32 pages;               // pages of the cache
    u32 seats;               // rows of `table`
    float scale;             // logits are q.k * scale; above 0
    float softcap;           // 0: none. Otherwise logits become softcap * tanh(logit / softcap)
    float k_scale;           // KV_E4M3: key = stored * k_scale, value = stored * v_scale. Otherwise 1
    float v_scale;

    __device__ __forceinline__ u32 length(u32 row) const { return min(len[row], table_stride * page_size); }
    __device__ __forceinline__ u32 page(u32 entry) const { return min(entry, pages - 1); }
    // Whether 16 rows of bytes that lie together begin at a multiple of 16, where the first of a page do.
    __device__ __forceinline__ bool runs_are_aligned() const { return ((u64)k | (u64)v | (u64)page_stride | (u64)head_stride) % 16 == 0; }
    // Whether there are the row's seat and its tokens.
    __device__ __forceinline__ bool has(u32 row, u32 its_span) const {
        return seat[row] < seats && its_span <= tokens && token_start[row] <= tokens - its_span;
    }
};
