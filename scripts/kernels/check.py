#!/usr/bin/env python3
"""Compiles every instance of the attention kernels for the architectures named and fails on a spill. Needs no GPU.

    LD_LIBRARY_PATH=<folder of libnvrtc.so.13> scripts/kernels/check.py [--arch sm_80 sm_90a sm_100a] [--only decode] [--dump DIR]
"""
import argparse
import pathlib
import sys

from instances import compile_kernel, instances, resources

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90a", "sm_100a"])
parser.add_argument("--only", default="", help="files whose name contains this")
parser.add_argument("--match", default="", help="instances whose defines contain this")
parser.add_argument("--dump", type=pathlib.Path, help="write the cubins here")
parser.add_argument("--define", nargs="*", default=[], help="NAME=VALUE more")
args = parser.parse_args()
bad = 0
for arch in args.arch:
    for file, defines in instances():
        defines.update(d.split("=") for d in args.define)
        name = f"{file[:-3]} {arch} " + " ".join(f"{k}={v}" for k, v in defines.items())
        if args.only not in file or args.match not in name:
            continue
        try:
            cubin, log = compile_kernel(file, defines, arch)
        except RuntimeError as error:
            print(error)
            bad += 1
            continue
        used = resources(log)
        if used["spills"] or used["stack"]:
            bad += 1
        print(f"{name}: {used['registers']} registers, {used['spills']} spill bytes, {used['stack']} stack bytes", flush=True)
        if args.dump:
            args.dump.mkdir(parents=True, exist_ok=True)
            (args.dump / (name.replace(" ", "_").replace("=", "-") + ".cubin")).write_bytes(cubin)
sys.exit(bad > 0)
