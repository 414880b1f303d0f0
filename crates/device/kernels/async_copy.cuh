// Copies from global to shared memory that are done while the warp goes on, and the barriers that tell of their end.
// Whoever includes this has u32 and DEVICE.
#pragma once

#ifndef COPY_ENGINE
#define COPY_ENGINE (__CUDA_ARCH__ >= 900)  // bulk copies; otherwise 16 bytes at a time
#endif

// A barrier completes when the bytes are there: counted by the copy engine, or by the lanes.
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

// 16 bytes from global to shared memory; with bytes = 0 nothing is read and zeros are written.
DEVICE void copy_async16(u32 shared, const void* global, u32 bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same of 4 bytes.
DEVICE void copy_async4(u32 shared, const void* global, u32 bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

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
