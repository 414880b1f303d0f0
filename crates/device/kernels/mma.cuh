// Inline PTX for the attention kernels: conversions, tensor-core products, asynchronous copies.
//
// "half" below is the 16-bit type that products run in: bf16 for a bf16 cache, f16 otherwise. For int8 that holds of the products
// with keys: weights times the scales of values would be too small for f16, so those with values run in bf16.
#pragma once
#include "attention.cuh"

#define DEVICE __device__ __forceinline__

#include "async_copy.cuh"

constexpr float LOG2E = 1.4426950408889634f;
#define MINUS_INF __int_as_float(0xff800000)

struct alignas(8) Word2 { u32 x, y; };
struct alignas(16) Word4 { u32 x, y, z, w; };
struct alignas(8) Float2 { float x, y; };
struct alignas(16) Float4 { float x, y, z, w; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// n / d for quotients below 2^20, in half the time of the general division.
DEVICE u32 divide(u32 n, u32 d) {
    u32 q = (u32)__fdividef((float)n, (float)d);
    const int rest = (int)(n - q * d);
    if (rest < 0) q--;
    else if (rest >= (int)d) q++;
    return q;
}

DEVICE float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }

DEVICE float f16_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE u32 pack_bf16(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

DEVICE u32 pack_f16(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

// Two e4m3 numbers (the low 16 bits of x) as f16x2, exact.
DEVICE u32 e4m3x2_to_f16x2(u32 x) {
    u32 y;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)x));
#else
    // Exponent and mantissa moved into place are the number times 2^-8, subnormals included.
    u32 high = __byte_perm(x, 0, 0x1404);
    u32 bits = (high & 0x80008000u) | ((high & 0x7f007f00u) >> 1);
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x5c005c00u));
#endif
    return y;
}

// Two signed bytes, the low or the high ones of x, exact: as f16x2, and as bf16x2.
template <int HIGH> DEVICE u32 i8x2_to_f16x2(u32 x) {
    // With the sign bit turned over it is 128 more, and these are the low bits of 1024.
    const u32 bits = __byte_perm(x ^ 0x80808080u, 0x64646464u, HIGH ? 0x4342 : 0x4140);
    u32 y;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x64806480u));
    return y;
}
template <int HIGH> DEVICE u32 i8x2_to_bf16x2(u32 x) {
    // The low seven bits on top of 128, less 128, or 256 where the sign bit is set.
    const u32 bits = __byte_perm(x, 0x43434343u, HIGH ? 0x4342 : 0x4140), sum = bits & 0xff7fff7fu, base = bits & 0xff80ff80u;
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(base), "r"(0xbf80bf80u), "r"(sum));
    return y;
}

#if KV_TYPE == KV_BF16
#define KEY_TYPES "f32.bf16.bf16.f32"
DEVICE u32 pack_half(float lo, float hi) { return pack_bf16(lo, hi); }
#else
#define KEY_TYPES "f32.f16.f16.f32"
DEVICE u32 pack_half(float lo, float hi) { return pack_f16(lo, hi); }
#endif
// Weights, as what values are multiplied with.
#if KV_TYPE == KV_I8
#define VALUE_TYPES "f32.bf16.bf16.f32"
DEVICE u32 pack_weights(float lo, float hi) { return pack_bf16(lo, hi); }
#else
#define VALUE_TYPES KEY_TYPES
DEVICE u32 pack_weights(float lo, float hi) { return pack_half(lo, hi); }
#endif

// Two of the four 8-bit elements in x, the low or the high ones, as halves for the products with keys or with values.
#if KV_TYPE == KV_I8
template <int HIGH> DEVICE u32 widen_keys(u32 x) { return i8x2_to_f16x2<HIGH>(x); }
template <int HIGH> DEVICE u32 widen_values(u32 x) { return i8x2_to_bf16x2<HIGH>(x); }
#else
template <int HIGH> DEVICE u32 widen_keys(u32 x) { return e4m3x2_to_f16x2(HIGH ? x >> 16 : x); }
template <int HIGH> DEVICE u32 widen_values(u32 x) { return e4m3x2_to_f16x2(HIGH ? x >> 16 : x); }
#endif

// d[16 x 8] += a[16 x 16] b[16 x 8].
#define MMA(name, types)                                                                                          \
    DEVICE void name(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                             \
        asm("mma.sync.aligned.m16n8k16.row.col." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"   \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                              \
    }
MMA(mma_keys, KEY_TYPES)
MMA(mma_values, VALUE_TYPES)

// Transposes an 8 x 8 matrix of 16-bit elements held by a warp.
DEVICE u32 transpose8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

DEVICE Word4 load_shared4(u32 address) {
    Word4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

DEVICE Word2 load_shared2(u32 address) {
    Word2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

DEVICE u32 load_shared1(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

DEVICE void ldmatrix4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void ldmatrix4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE float max_over_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

DEVICE float sum_over_rows(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

// The logit of a raw product, times log2(e) so that exp2 serves: scale2 = scale * k_scale * log2(e).
DEVICE float logit2(float product, float scale2, float softcap) {
    float x = product * scale2;
    if (softcap != 0.f) {
        float e = exp2_approx(2.f * x / softcap);  // exp(2 logit / softcap), since x = logit * log2(e)
        x = softcap * LOG2E * (1.f - 2.f / (e + 1.f));
    }
    return x;
}

#if Q_TYPE == Q_BF16
typedef u16 QElement;
DEVICE Float4 load_q4(const QElement* p) {
    Word2 w = *(const Word2*)p;
    return {__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u), __uint_as_float(w.y << 16),
            __uint_as_float(w.y & 0xffff0000u)};
}
DEVICE void store_out2(QElement* p, float x, float y) { *(u32*)p = pack_bf16(x, y); }
// Four elements as halves, in two words.
DEVICE Word2 load_half4(const QElement* p) {
#if KV_TYPE == KV_BF16
    return *(const Word2*)p;
#else
    Float4 x = load_q4(p);
    return {pack_half(x.x, x.y), pack_half(x.z, x.w)};
#endif
}
#else
typedef float QElement;
DEVICE Float4 load_q4(const QElement* p) { return *(const Float4*)p; }
DEVICE void store_out2(QElement* p, float x, float y) { *(Float2*)p = {x, y}; }
DEVICE Word2 load_half4(const QElement* p) {
    Float4 x = load_q4(p);
    return {pack_half(x.x, x.y), pack_half(x.z, x.w)};
}
#endif
