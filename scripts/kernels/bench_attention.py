#!/usr/bin/env python3
"""Times the attention kernels on a GPU, by graph replay, beside torch/cuDNN on contiguous memory and FlashInfer if it is there.

    scripts/kernels/bench_attention.py [decode] [other] [prefill] [--layers 32] [--variant WARPS=8,STAGES=3,blocks=132 ...]

decode   32 query and 8 key/value heads of 128, page 16 shuffled, bf16. Every launch of a replay reads another layer of a pool of
         full depth ("pool": nothing is left in L2 from the launch before), and, as in the table of peers, one buffer again and
         again ("same"). GB/s are bytes of keys and values read over the median time of a launch.
other    head dims, page sizes, element types, windows, uneven lengths; the bytes are those that must be read.
prefill  causal, TFLOP/s.
"""
import argparse
import gc
import json
import statistics
import time

import torch

from harness import Kernel, Step
from instances import BEHIND, ELEMENT

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("parts", nargs="*", default=["decode", "other", "prefill"])
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--variant", nargs="*", default=[""])
parser.add_argument("--other", nargs="*", default=[""], help="variants for that part")
parser.add_argument("--match", default="", help="only what of that part contains this")
parser.add_argument("--cells", default="", help="B:L,B:L of the decode table")
parser.add_argument("--peers", action="store_true")
parser.add_argument("--layout", default="hnd")
parser.add_argument("--json", help="append one line per figure here")
args = parser.parse_args()
CELLS = [(1, 1024), (1, 16384), (1, 131072), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (128, 4096), (256, 1024), (256, 4096)]
if args.cells:
    CELLS = [tuple(map(int, c.split(":"))) for c in args.cells.split(",")]


def median_graph(functions, repeats=15):
    """Microseconds of one call when all functions, in turn, are replayed from one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for f in functions[:2]:
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in functions:
            f()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(functions))
    return statistics.median(times)


def emit(**line):
    if args.json:
        with open(args.json, "a") as f:
            f.write(json.dumps(line) + "\n")


def bench_step(step, defines, bytes_read, variants, same=True):
    """A list of texts, one per variant."""
    cells = []
    for variant in variants:
        more = dict(v.split("=") for v in variant.split(",") if v)
        blocks, overlap = int(more.pop("blocks", step.blocks)), bool(int(more.pop("overlap", 1)))
        kernel = Kernel("attention_decode.cu", {**defines, **{k: int(v) for k, v in more.items()}})
        kernel.overlap = overlap
        keep, step.blocks = step.blocks, blocks
        if blocks > keep:
            step.partial = torch.empty(16 * blocks * 16 * 258, device="cuda")
            step.counter = torch.zeros(max(8 * blocks, step.rows * step.kv_heads) + 2, dtype=torch.int32, device="cuda")
        launches = []
        for layer in range(step.layers):
            a = step.args(layer)
            launches.append(lambda a=a: kernel.run(step, a))
        us = median_graph(launches * max(1, 20 // step.layers))
        text = f"{us:.1f}us {bytes_read / us / 1e3:.0f}"
        if same:
            us1 = median_graph(launches[:1] * 20)
            text += f" (same {us1:.1f}us {bytes_read / us1 / 1e3:.0f})"
            emit(part="decode", B=step.rows, L=step.lens[0], variant=variant, layout=step.layout, us=us, us_same=us1, bytes=bytes_read)
        step.blocks = keep
        assert step.out.isfinite().all() or step.out[:-2].isfinite().all(), "an output is missing"
        cells.append(f"{variant or 'default'}: {text}")
    return cells


def flashinfer_decode(B, L, layers):
    import flashinfer
    pages = B * (L // 16)
    order = torch.randperm(pages, dtype=torch.int32)
    indptr = torch.arange(0, B + 1, dtype=torch.int32) * (L // 16)
    last = torch.full((B,), 16, dtype=torch.int32)
    pool = torch.empty(pages, layers, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda").normal_()
    contiguous = torch.empty(pages, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda").normal_()
    q = torch.randn(B, 32, 128, dtype=torch.bfloat16, device="cuda")
    best = {}
    for cores in (False, True):
        space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=cores, use_cuda_graph=True,
            paged_kv_indptr_buffer=torch.empty(B + 1, dtype=torch.int32, device="cuda"),
            paged_kv_indices_buffer=torch.empty(pages, dtype=torch.int32, device="cuda"),
            paged_kv_last_page_len_buffer=torch.empty(B, dtype=torch.int32, device="cuda"))
        w.plan(indptr, order, last, 32, 8, 128, 16, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        us_same = median_graph([lambda: w.run(q, contiguous)] * 20)
        best["same"] = min(best.get("same", 1e9), us_same)
        try:
            k, v = pool[:, 0, 0], pool[:, 0, 1]
            w.run(q, (k, v))
            us = median_graph([lambda i=i: w.run(q, (pool[:, i, 0], pool[:, i, 1])) for i in range(layers)])
            best["pool"] = min(best.get("pool", 1e9), us)
        except Exception as error:
            best["error"] = str(error)[:80]
    return best


def torch_decode(B, L, layers):
    q = torch.randn(B, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    kv = [tuple(torch.empty(B, 8, L, 128, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)) for _ in range(layers)]
    run = lambda i: torch.nn.functional.scaled_dot_product_attention(q, *kv[i], enable_gqa=True)
    return {"pool": median_graph([lambda i=i: run(i) for i in range(layers)] * max(1, 20 // layers)), "same": median_graph([lambda: run(0)] * 20)}


def depth(B, L):
    return max(1, min(args.layers, int(45e9 // (B * L * 4096))))


DECODE = {"HEAD_DIM": 128, "KV_TYPE": "KV_BF16", "Q_TYPE": "Q_BF16", "GROUP_TILE": 8}
print(torch.cuda.get_device_name(), torch.__version__, time.strftime("%Y-%m-%d"), flush=True)
x = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
us = median_graph([lambda: x.view(torch.float32).sum()] * 2)
print(f"read (torch sum of 4 GiB): {x.numel() * 2 / us / 1e3:.0f} GB/s", flush=True)
del x

if "decode" in args.parts:
    for B, L in CELLS:
        bytes_read, layers = B * L * 4096, depth(B, L)
        step = Step([L] * B, [1] * B, layers=layers, layout=args.layout, poison=False)
        line = f"decode B={B} L={L} ({layers} layers, {args.layout})"
        for text in bench_step(step, DECODE, bytes_read, args.variant):
            line += "\n    " + text
        step = None
        gc.collect()
        torch.cuda.empty_cache()
        if args.peers:
            for name, peer in (("flashinfer", flashinfer_decode), ("torch/cuDNN contiguous", torch_decode)):
                try:
                    found = peer(B, L, layers)
                    text = ", ".join(f"{k} {v:.1f}us {bytes_read / v / 1e3:.0f}" if k != "error" else f"pool failed: {v}" for k, v in found.items())
                    emit(part="decode", B=B, L=L, peer=name, bytes=bytes_read, **found)
                except Exception as error:
                    text = f"failed: {type(error).__name__} {str(error)[:200]}"
                line += f"\n    {name}: {text}"
                torch.cuda.empty_cache()
        print(line, flush=True)

def read_rate(size):
    """GB/s of a torch sum over so many bytes that no cache holds: the limit of a shape that reads as many."""
    flats = [torch.ones(size // 4, device="cuda") for _ in range(max(2, -(-(512 << 20) // size)))]
    return size / median_graph([lambda flat=flat: flat.sum() for flat in flats], 7) / 1e3


if "other" in args.parts:
    uneven = [32768] + [512] * 63
    for name, more in {
        "head_dim 64, 64 x 4096": dict(head_dim=64),
        "head_dim 256, 64 x 4096": dict(head_dim=256),
        "page 64, 64 x 4096": dict(page=64),
        "page 16 nhd, 64 x 4096": dict(layout="nhd"),
        "fp8, 64 x 4096": dict(kv="E4M3"),
        "fp8, 64 x 8192": dict(kv="E4M3", lens=[8192] * 64),
        "fp8 head_dim 256, 64 x 4096": dict(kv="E4M3", head_dim=256),
        "i8, 64 x 4096": dict(kv="I8"),
        "i8, 64 x 8192": dict(kv="I8", lens=[8192] * 64),
        "i8 head_dim 256, 64 x 4096": dict(kv="I8", head_dim=256),
        "f16, 64 x 4096": dict(kv="F16"),
        "window 1024, 64 x 4096": dict(window=1024),
        "window 1024, 256 x 4096": dict(window=1024, lens=[4096] * 256),
        "uneven 1 x 32768 + 63 x 512": dict(lens=uneven),
        "uneven, batch invariant (chunk 1024)": dict(lens=uneven, chunk=1024),
        "64 x 4096, batch invariant (chunk 1024)": dict(chunk=1024),
        "group 8 (64/8 heads), 64 x 4096": dict(group=8),
        "group 16 (64/4 heads), 64 x 4096": dict(group=16, kv_heads=4),
        "1 kv head, group 8, 1 x 16384": dict(group=8, kv_heads=1, lens=[16384]),
        "1 kv head, 512 x 4096, pages in order": dict(kv_heads=1, lens=[4096] * 512, shuffled=False, layers=1),
        "1 kv head, 512 x 4096, pages shuffled": dict(kv_heads=1, lens=[4096] * 512, layers=1),
        "256 x 512": dict(lens=[512] * 256),
        "ragged 4000 +- 100, 64": dict(lens=[4000 + 37 * i % 201 - 100 for i in range(64)]),
    }.items():
        if args.match not in name:
            continue
        lens = more.pop("lens", [4096] * 64)
        defines = {"HEAD_DIM": more.get("head_dim", 128), "KV_TYPE": f"KV_{more.get('kv', 'BF16')}", "Q_TYPE": "Q_BF16",
                   "GROUP_TILE": 8 if more.get("group", 4) <= 8 else 16}
        try:
            step = Step(lens, [1] * len(lens), poison=False, **{"layers": 8, **more})
            size = ELEMENT[step.kv] + BEHIND.get(step.kv, 0) / step.head_dim
            seen = sum(min(n, step.window or n) for n in lens)
            bytes_read = int(seen * step.kv_heads * step.head_dim * 2 * size)
            for text in bench_step(step, defines, bytes_read, args.other, same=False):
                print(f"{name}: {text} GB/s", flush=True)
            step = None
            torch.cuda.empty_cache()
            print(f"{name}: a sum of as many bytes reads {read_rate(bytes_read):.0f} GB/s", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"{name}: failed: {str(error)[:200]}", flush=True)

if "prefill" in args.parts:
    for B, L in [(1, 2048), (1, 8192), (1, 16384), (8, 1024), (8, 2048)]:
        flops = B * 4 * L * L * 32 * 128 / 2
        step = Step([L] * B, [L] * B, poison=False)
        kernel = Kernel("attention_prefill.cu", {"HEAD_DIM": 128, "KV_TYPE": "KV_BF16", "Q_TYPE": "Q_BF16"})
        us = median_graph([lambda: kernel.run(step, step.args())] * 2, 7)
        line = f"prefill {B} x {L}: {us:.0f}us {flops / us / 1e6:.0f} TFLOP/s"
        emit(part="prefill", B=B, L=L, us=us, flops=flops)
        if args.peers:
            q, k, v = (torch.randn(B, h, L, 128, dtype=torch.bfloat16, device="cuda") for h in (32, 8, 8))
            us = median_graph([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 2, 7)
            line += f"; torch contiguous {us:.0f}us {flops / us / 1e6:.0f}"
            try:
                import flashinfer
                pages = B * L // 16
                pool = torch.randn(pages, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
                indptr = torch.arange(0, B + 1, dtype=torch.int32, device="cuda")
                q = torch.randn(B * L, 32, 128, dtype=torch.bfloat16, device="cuda")
                for backend in ("fa2", "fa3"):
                    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend=backend)
                    w.plan(indptr * L, indptr * (L // 16), torch.randperm(pages, dtype=torch.int32, device="cuda"),
                           torch.full((B,), 16, dtype=torch.int32, device="cuda"), 32, 8, 128, 16, causal=True,
                           q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
                    w.run(q, pool)
                    us = median_graph([lambda: w.run(q, pool)] * 2, 7)
                    line += f"; FlashInfer {backend} paged {us:.0f}us {flops / us / 1e6:.0f}"
            except Exception as error:
                line += f"; FlashInfer failed: {str(error)[:120]}"
        print(line, flush=True)
