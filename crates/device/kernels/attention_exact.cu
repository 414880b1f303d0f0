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
