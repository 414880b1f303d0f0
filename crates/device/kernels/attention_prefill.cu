// Paged attention of rows with many query tokens ("prefill"), mixed spans and starts, FlashAttention-2 order of work.
//
//   extern "C" __global__ void attention_prefill(AttentionArgs args)
//
// Rows taken: span >= min_span. KV_TYPE: KV_BF16, KV_F16, KV_E4M3. A row of len 0 gets 0.
//
// A block takes BLOCK_M packed queries of one row and one key/value head: query i is token i / group, head i % group.
//   BLOCK_M = 128 (HEAD_DIM 256: 64)
// Launch: grid (ceil(tokens * group / BLOCK_M) + rows, kv_heads, 1), `tokens` and `rows` being bounds (blocks
//         without work leave at once); block (128, 1, 1);
//         dynamic shared memory, bytes: 2 * HEAD_DIM * (BLOCK_M + 4 * 64) + 1024
//         (HEAD_DIM 64: 49 KiB, 128: 97 KiB, 256: 161 KiB).
// Workspace: none.
//
// Deterministic and batch invariant: a token's bits depend on its own row's span, len, keys and values alone.

#include "attention.cuh"
