#!/usr/bin/env python3
"""Holds the attention kernels to float64 on a GPU: random shapes, poisoned pools and outputs, replays, determinism.

    scripts/kernels/test_attention.py [--cases 60] [--seed 1] [--only decode] [--kv I8]     (exit status 1 after any failure)
"""
import argparse
import random
import sys
import traceback

import torch

from harness import Kernel, Step

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cases", type=int, default=60, help="random cases per kernel")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--only", default="")
parser.add_argument("--kv", default="", help="caches of this type alone")
parser.add_argument("--define", nargs="*", default=[], help="NAME=VALUE more, for attention_decode (COPY_ENGINE=0: as before sm_90)")
args = parser.parse_args()
ODD = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257, 500, 1000, 1023, 1025, 2049, 4099]
TAKEN = {"attention_decode": lambda span: span == 1, "attention_prefill": lambda span: span >= 1, "attention_exact": lambda span: span >= 1}
kernels, failures = {}, 0


def kernel(name, step):
    defines = {"HEAD_DIM": step["head_dim"], "KV_TYPE": f"KV_{step['kv']}", "Q_TYPE": f"Q_{step['q']}"}
    if name == "attention_decode":
        defines["GROUP_TILE"] = 8 if step["group"] <= 8 else 16
        defines.update((k, int(v)) for k, v in (d.split("=") for d in args.define))
    key = (name, *defines.values())
    if key not in kernels:
        kernels[key] = Kernel(name + ".cu", defines)
    return kernels[key]


def limit(step):
    return 1e-5 if step["kv"] == "F32" and step["q"] == "F32" else 1e-2


def random_step(name, rng):
    exact = name == "attention_exact"
    decode = name == "attention_decode"
    rows = rng.choice([1, 1, 2, 3, 7, 20, 300 if decode else 9])
    lens = [rng.choice(ODD) if rng.random() < 0.8 else rng.randrange(3000) for _ in range(rows)]
    if rows == 300:
        lens = [min(n, 300) for n in lens]
    spans = []
    for i, n in enumerate(lens):
        if decode:
            spans.append(rng.choice([1, 1, 1, 1, 0, 3]))
        else:
            spans.append(rng.choice([0, 1, 2, 3, 17, 64, 130, 300]))
        spans[i] = min(spans[i], n)
    causal = int(rng.random() < 0.8)
    if not causal or decode:  # an empty stream that a query reads; with a mask its len is at least span
        spans = [s or rng.choice([0, 1]) for s in spans]
        causal = causal and all(s <= n for s, n in zip(spans, lens))
    head_dim = rng.choice([64, 128, 128, 256] + ([80, 32] if exact else []))
    kv = rng.choice(["F32"] * 3 * exact + ["BF16", "BF16", "F16", "E4M3", "I8"])
    return dict(lens=lens, spans=spans, head_dim=head_dim, kv=args.kv or kv,
                q=rng.choice(["BF16", "F32"]), kv_heads=rng.choice([1, 2, 3, 8]), group=rng.choice([1, 2, 3, 4, 4, 7, 8, 12, 16]),
                page=rng.choice([16, 16, 16, 32, 48, 64, 1, 8, 5]), layers=rng.choice([1, 3]), layout=rng.choice(["hnd", "hnd", "nhd"]),
                window=rng.choice([0, 0, 1, 5, 100, 1000]) * causal, causal=int(causal), softcap=rng.choice([0, 0, 30.0]),
                chunk=rng.choice([0, 0, 64, 512]) * decode, blocks=rng.choice([132, 132, 1, 3, 50]), sharp=rng.choice([1.0, 4.0]),
                seed=rng.randrange(1 << 30))


def case(name, step):
    global failures
    try:
        s = Step(**step)
        k = kernel(name, step)
        k.run(s, s.args())
        torch.cuda.synchronize()
        worst = s.verify(TAKEN[name], limit(step))
        first = s.out.clone()
        for _ in range(3):  # launches that overlap share a workspace
            k.run(s, s.args())
        torch.cuda.synchronize()
        assert not s.counter.any(), "a counter was left by one of several launches"
        assert torch.equal(first.nan_to_num(), s.out.nan_to_num()), "another launch gives other bits"
        return worst
    except Exception as error:
        failures += 1
        print(f"FAILED {name} {step}\n  {type(error).__name__}: {str(error)[:300]}", flush=True)
        if not isinstance(error, AssertionError):
            traceback.print_exc()
            if "CUDA" in str(error) or "launch" in str(error) or "illegal" in str(error):
                sys.exit(1)
        return None


def invariant():
    """With a chunk, a row gives the same bits alone, in a batch, and on another grid."""
    global failures
    base = dict(head_dim=128, kv="BF16", q="BF16", chunk=256, seed=5)
    many = Step(lens=[3000, 17, 4099, 640, 1], spans=[1] * 5, **base)
    k = kernel("attention_decode", dict(group=4, **base))
    k.run(many, many.args())
    torch.cuda.synchronize()
    for r in range(5):
        for blocks in (132, 7):
            alone = many.args()
            alone.rows = 1
            for column in ("seat", "span", "len", "token_start"):
                setattr(alone, column, getattr(alone, column) + 4 * r)
            before = many.out[r].clone()
            many.out[r] = float("nan")
            many.blocks = blocks
            k.run(many, alone)
            torch.cuda.synchronize()
            if not torch.equal(before, many.out[r]):
                failures += 1
                print(f"FAILED invariance: row {r} alone on {blocks} blocks")


names = [n for n in TAKEN if args.only in n]
for name in names:
    rng = random.Random(args.seed)
    steps = [random_step(name, rng) for _ in range(args.cases)]
    errors = {}
    for step in steps:
        worst = case(name, step)
        if worst is not None:
            key = (step["kv"], step["q"])
            errors[key] = max(errors.get(key, 0), worst)
    print(name, f"{len(steps)} cases, worst relative error by (cache, q):", {k: f"{v:.1e}" for k, v in sorted(errors.items())}, flush=True)
if "attention_decode" in names:
    invariant()
print("failures:", failures)
sys.exit(failures > 0)
