#!/usr/bin/env python3
"""Compiles kernel files with NVRTC, without a GPU, and says what each kernel takes.

usage: nvrtc_compile.py [--arch sm_90a ...] [--out DIR] [--lib libnvrtc.so.13] FILE.cu ...

NVRTC opens its builtins by name, so its folder must be on LD_LIBRARY_PATH. Prints registers, shared
memory, stack and spills of every kernel; fails when a file does not compile or a kernel spills.
"""

import argparse
import ctypes
import os
import re
import sys


def compile_file(nvrtc, path, arch):
    """The cubin of a file and the compiler's log."""
    with open(path, "rb") as file:
        source = file.read()
    program = ctypes.c_void_p()
    name = os.path.basename(path).encode()
    code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    if code != 0:
        raise RuntimeError(f"nvrtcCreateProgram: error {code}")
    folder = os.path.dirname(os.path.abspath(path))
    options = [f"--gpu-architecture={arch}", "--std=c++17", f"-I{folder}", "--ptxas-options=-v"]
    raw = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), raw)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.value.decode(errors="replace")
    if code != 0:
        return None, text
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin.raw, text


def kernels_of(log):
    """(name, registers, stack bytes, spilled bytes, shared bytes) of each kernel in ptxas's log."""
    name, stack, spilled = None, 0, 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line):
            stack, spilled = int(found[1]), int(found[2]) + int(found[3])
        elif (found := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, int(found[1]), stack, spilled, int(shared[1]) if shared else 0
            name = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append")
    parser.add_argument("--out", help="folder for <file>.<arch>.cubin")
    parser.add_argument("--lib", default="libnvrtc.so.13")
    parser.add_argument("--quiet", action="store_true", help="only sums and what is wrong")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    nvrtc = ctypes.CDLL(options.lib)
    failed = False
    for path in options.files:
        for arch in options.arch or ["sm_80", "sm_90a", "sm_100a"]:
            cubin, log = compile_file(nvrtc, path, arch)
            base = os.path.basename(path)
            if cubin is None:
                print(f"{base} {arch}: does not compile\n{log}")
                failed = True
                continue
            rows = list(kernels_of(log))
            print(f"{base} {arch}: {len(rows)} kernels, {len(cubin)} bytes")
            for name, registers, stack, spilled, shared in rows:
                if not options.quiet or stack or spilled:
                    print(f"  {name}: {registers} registers, {shared} shared, "
                          f"{stack} stack, {spilled} spilled")
                failed |= spilled > 0
            for line in log.splitlines():
                if "warning" in line:
                    print("  " + line)
            if options.out:
                os.makedirs(options.out, exist_ok=True)
                stem = base.removesuffix(".cu")
                with open(os.path.join(options.out, f"{stem}.{arch}.cubin"), "wb") as file:
                    file.write(cubin)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
