"""Kernel files, compiled and launched on torch tensors through the driver."""

import ctypes

import torch

from instances import compile_kernel

_cuda = ctypes.CDLL("libcuda.so.1")


def u32(x):
    return ctypes.c_uint32(x)


def i64(x):
    return ctypes.c_int64(x)


def f32(x):
    return ctypes.c_float(x)


def _check(code, what):
    if code != 0:
        text = ctypes.c_char_p()
        _cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'?').decode()} ({code})")


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
                + [("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                   ("count", ctypes.c_uint)])


_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Module:
    """All kernels of a file. Arguments: tensors and None as addresses, else ctypes values."""

    def __init__(self, file, **defines):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}a" if major >= 9 else "sm_80"
        cubin, _ = compile_kernel(file, defines, arch)
        self.module = ctypes.c_void_p()
        _check(_cuda.cuModuleLoadData(ctypes.byref(self.module), cubin), f"loading {file}")
        self.found = {}

    def launch(self, name, grid, threads, *args, shared=0, overlap=False, cooperative=False):
        if name not in self.found:
            function = ctypes.c_void_p()
            code = _cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode())
            _check(code, name)
            self.found[name] = function
        values = []
        for arg in args:
            if arg is None:
                values.append(ctypes.c_uint64(0))
            elif isinstance(arg, torch.Tensor):
                values.append(ctypes.c_uint64(arg.data_ptr()))
            else:
                values.append(arg)
        pointers = (ctypes.c_void_p * len(values))(
            *[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
        grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)[:3]
        if shared:
            _check(_cuda.cuFuncSetAttribute(self.found[name], 8, shared), name)
        stream = torch.cuda.current_stream().cuda_stream
        attribute = _Attribute(id=_COOPERATIVE if cooperative else _PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = _Config(*grid, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(overlap or cooperative))
        _check(_cuda.cuLaunchKernelEx(ctypes.byref(config), self.found[name], pointers, None), name)


class Report:
    """Counts checks; says what failed."""

    def __init__(self):
        self.passed, self.failed = 0, 0

    def check(self, what, holds, detail=""):
        if holds:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAILED {what} {detail}", flush=True)

    def near(self, what, got, want, relative, absolute=0.0):
        """Every element within relative * |want| + absolute of the float64 reference."""
        error = (got.double() - want).abs()
        bad = ~(error <= relative * want.abs() + absolute)
        worst = error.max().item() if error.numel() else 0.0
        self.check(what, not bad.any().item(), f"{int(bad.sum())} elements, worst error {worst:.3g}")

    def equal(self, what, got, want):
        same = got.shape == want.shape and torch.equal(got, want)
        self.check(what, same, "" if same else f"{int((got != want).sum())} elements differ")


def median_us(work, repeats=50):
    """Median time of `work` in microseconds, by replaying a graph of ten."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return sorted(times)[len(times) // 2]
