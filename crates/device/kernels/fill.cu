// Pseudo-random bf16 weights, for benchmarks of shapes whose weights are not at hand.

typedef unsigned short u16;
typedef unsigned long long u64;

// 64 well mixed bits (splitmix64).
__device__ __forceinline__ u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// out[i] = about normal with this deviation: the sum of four uniform numbers, which depends on
// (seed, i) alone.
extern "C" __global__ void fill_random(u16* out, u64 n, float deviation, u64 seed) {
    u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        u64 bits = mix(seed ^ mix(i));
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            sum += static_cast<float>((bits >> (16 * part)) & 0xffff) * (1.0f / 65536.0f) - 0.5f;
        }
        // A uniform number has variance 1/12, so the sum has 1/3.
        float value = sum * 1.7320508f * deviation;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out[i]) : "f"(value));
    }
}
