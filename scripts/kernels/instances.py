"""The instances of the attention kernels that are checked, and how one is compiled: shared by check.py and bench.py.

Compilation is by NVRTC through ctypes, with the options that the engine uses, so that no GPU is needed.
"""
import ctypes
import hashlib
import os
import pathlib
import re

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "crates" / "device" / "kernels"
ELEMENT = {"BF16": 2, "F16": 2, "E4M3": 1, "I8": 1, "F32": 4}
BEHIND = {"I8": 4}  # bytes behind a row, for its scale


def library():
    for name in (os.environ.get("NVRTC"), "libnvrtc.so.13", "libnvrtc.so"):
        if name:
            try:
                return ctypes.CDLL(name)
            except OSError:
                pass
    raise SystemExit("no NVRTC: set NVRTC to libnvrtc.so.13 and put its folder on LD_LIBRARY_PATH")


_nvrtc = None


def compile_kernel(file, defines, arch):
    """The cubin of one instance and the compiler's log (registers, spills). Kept in the folder KERNEL_CACHE, if set."""
    if cache := os.environ.get("KERNEL_CACHE"):
        digest = hashlib.sha256(repr((file, sorted((k, str(v)) for k, v in defines.items()), arch)).encode())
        for source in sorted(KERNELS.glob("*.cuh")) + [KERNELS / file]:
            digest.update(source.read_bytes())
        kept = pathlib.Path(cache) / f"{digest.hexdigest()[:24]}.cubin"
        if kept.exists():
            return kept.read_bytes(), kept.with_suffix(".log").read_text()
        cubin, log = _compile(file, defines, arch)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".log").write_text(log)
        kept.write_bytes(cubin)
        return cubin, log
    return _compile(file, defines, arch)


def _compile(file, defines, arch):
    global _nvrtc
    _nvrtc = _nvrtc or library()
    check = lambda code, what: code and (_ for _ in ()).throw(RuntimeError(f"{what}: NVRTC error {code}"))
    headers = sorted(KERNELS.glob("*.cuh"))
    sources = [h.read_bytes() for h in headers]
    program = ctypes.c_void_p()
    array = ctypes.c_char_p * len(headers)
    check(_nvrtc.nvrtcCreateProgram(ctypes.byref(program), (KERNELS / file).read_bytes(), file.encode(), len(headers),
                                    array(*sources), array(*[h.name.encode() for h in headers])), "create")
    options = ["--std=c++17", f"--gpu-architecture={arch}", "--ptxas-options=-v", "-lineinfo"]
    options += [f"-D{k}={v}" for k, v in defines.items()]
    code = _nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    size = ctypes.c_size_t()
    _nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    _nvrtc.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if code:
        raise RuntimeError(f"{file} {defines} {arch} does not compile:\n{log}")
    check(_nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
    cubin = ctypes.create_string_buffer(size.value)
    check(_nvrtc.nvrtcGetCUBIN(program, cubin), "cubin")
    _nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, log


def resources(log):
    """Registers, bytes of spill stores and loads, stack frame, from the compiler's log."""
    number = lambda pattern: sum(int(x) for x in re.findall(pattern, log))
    return {"registers": number(r"Used (\d+) registers"), "spills": number(r"(\d+) bytes spill"), "stack": number(r"(\d+) bytes stack")}


def instance(file, head_dim, kv, q, **more):
    return file, {"HEAD_DIM": head_dim, "KV_TYPE": f"KV_{kv}", "Q_TYPE": f"Q_{q}", **more}


def instances():
    """A list of (file, defines) that together cover every macro."""
    found = []
    for head_dim in (64, 128, 256):
        for kv in ("BF16", "F16", "E4M3", "I8"):
            for q in ("BF16", "F32"):
                for group_tile in (8, 16):
                    found.append(instance("attention_decode.cu", head_dim, kv, q, GROUP_TILE=group_tile))
                found.append(instance("attention_prefill.cu", head_dim, kv, q))
    for head_dim in (32, 64, 80, 128, 256):
        for kv in ELEMENT:
            for q in ("BF16", "F32"):
                found.append(instance("attention_exact.cu", head_dim, kv, q))
    return found


def decode_geometry(defines):
    """Warps and stages of attention_decode.cu for these defines (its defaults), and the bytes of one row."""
    kv = defines["KV_TYPE"][3:]
    row = defines["HEAD_DIM"] * ELEMENT[kv] + BEHIND.get(kv, 0)
    few = row >= 256 or defines["GROUP_TILE"] > 8
    warps = defines.get("WARPS", 4 if row >= 512 else 8 if few else 12)
    stages = defines.get("STAGES", 3 if row >= 256 else (8 if few else 7) if row < 128 else 6 if few else 4)
    return warps, stages, row
