// Kernels that overlap with their neighbours.
//
// A kernel may be launched with programmatic stream serialization (sm_90 and later): its blocks then begin as soon as
// all blocks of the kernel in front of it have begun and processors have room. Until `after_kernel_before` returns it may
// read only what no earlier kernel of the stream writes, and must write nothing. Every thread calls it, also one
// with nothing to do: the kernel behind counts on it that what is ended has everything before it ended too.
#pragma once

#if __CUDA_ARCH__ >= 900
// The kernel behind may begin, once all blocks have come here.
#define KERNEL_BEHIND_MAY_BEGIN() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
// Waits until the kernel in front has ended and what it wrote can be seen.
#define AFTER_KERNEL_BEFORE() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define KERNEL_BEHIND_MAY_BEGIN()
#define AFTER_KERNEL_BEFORE()
#endif

// For a kernel that has nothing to do before the one in front has ended.
#define IN_TURN()            \
  do {                       \
    KERNEL_BEHIND_MAY_BEGIN(); \
    AFTER_KERNEL_BEFORE();   \
  } while (0)
