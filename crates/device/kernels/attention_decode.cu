// Paged attention of one query token per row ("decode"), split over the context.
//
//   extern "C" __global__ void attention_decode(AttentionArgs args)
//
// Macros beside those of attention.cuh:
//   -D GROUP_TILE=8 | 16     the smaller one that is >= group
//   -D WARPS, -D STAGES      warps per block and tiles in flight per warp. Defaults, from ROW = HEAD_DIM * element size:
//                              ROW 512: WARPS 4, STAGES 3    ROW 128: WARPS 8, STAGES 6
//                              ROW 256: WARPS 8, STAGES 3    ROW  64: WARPS 8, STAGES 8
//                            sized for the 227 KiB of sm_90 and sm_100. sm_80 (163 KiB): the same with STAGES 2, 2, 4, 8;
//                            sm_86/89 (99 KiB): WARPS 4 (ROW 512: 2) with STAGES 2, 2, 4, 8.
//
// Rows taken: span == 1. A row of len 0 gets 0.
//
// Launch: grid (G, 1, 1), G = processors of the device (any G is right; this one is fast);
//         block (32 * WARPS, 1, 1);
//         dynamic shared memory, bytes:
//           WARPS * STAGES * (2 * (16 * ROW + 128) + 8) + WARPS * GROUP_TILE * 8 + 4 * (rows + 1) + 256
//         with `rows` of the arguments; set the function's limit to the largest that will be used.
// Workspace: chunk == 0: counter 4 * G bytes, partial 2 * G * P bytes;
//            chunk > 0:  counter 4 * rows * kv_heads bytes, partial rows * kv_heads * ceil(max_len / chunk) * P bytes;
//            P = 4 * GROUP_TILE * (HEAD_DIM + 2). Launches that may overlap in time need workspaces of their own.
//
// Deterministic: the same arguments and G give the same bits. With chunk > 0 a row's bits depend on its own
// query, keys, values and len alone, whatever the batch and G.

#include "attention.cuh"
