#!/usr/bin/env python3
"""Products of a few rows against float64, and their time beside torch's (cuBLAS), on a GPU.

Inputs are new in every run, outputs poisoned. Times are of graph replays over weights that no cache holds:
every launch has another copy, 256 MiB and more of them.
"""

import sys

import torch

from check_small import norm_of, poisoned, random
from launch import Module, Report, f32, u32

ROWS = [1, 2, 3]
EPS = 1e-5
THREADS, RING = 512, 96 << 10
BLOCKS = torch.cuda.get_device_properties(0).multi_processor_count


def reference(x, weight):
    return x.double() @ weight.double().T


def activated(name, both):
    gate, up = both.to(torch.bfloat16).double().chunk(2, -1)
    function = torch.nn.functional
    gate = function.silu(gate) if name == "silu" else function.gelu(gate, approximate="tanh")
    return gate * up


class Call:
    """One product with its tensors."""

    def __init__(self, module, source, target, rows, inputs, outputs, copies=1):
        self.module, self.name = module, f"gemv_{source}_{target}_{rows}"
        self.source, self.target, self.rows, self.outputs = source, target, rows, outputs
        self.inputs, height = inputs, outputs * (2 if target in ("silu", "gelu") else 1)
        self.x = random(rows, inputs, name="f32" if source == "normed" else "bf16")
        self.norm, self.bias = random(inputs), random(outputs)
        self.weights = [(torch.randn(height, inputs, device="cuda") / inputs**0.5).bfloat16() for _ in range(copies)]
        self.out = self.new_out()
        self.turn = 0

    def new_out(self):
        if self.target == "add":
            return random(self.rows, self.outputs)
        return poisoned(self.rows, self.outputs, name="f32" if self.target == "f32" else "bf16")

    def run(self, overlap=True, bias=True, blocks=BLOCKS):
        weight = self.weights[self.turn % len(self.weights)]
        self.turn += 1
        args = [self.x] + ([self.norm, f32(EPS)] if self.source == "normed" else []) + [weight, self.out]
        if self.target == "bf16":
            args.append(self.bias if bias else None)
        self.module.launch(self.name, blocks, THREADS, *args, u32(self.inputs), u32(self.outputs),
                           shared=RING + 2 * self.rows * self.inputs, overlap=overlap)

    def want(self, before):
        x = norm_of(self.x, self.norm, EPS).to(torch.bfloat16) if self.source == "normed" else self.x
        product = reference(x, self.weights[0])
        if self.target == "bf16":
            return product + self.bias.double()
        if self.target == "add":
            return product + before.double()
        return product if self.target == "f32" else activated(self.target, product)


def check(report, module):
    kinds = [("normed", t) for t in ("bf16", "f32", "silu", "gelu")] + [("plain", "bf16"), ("plain", "add")]
    for source, target in kinds:
        for inputs, outputs in [(8, 1), (64, 96), (576, 1537), (1024, 4096), (4096, 513), (4104, 40), (14336, 256)]:
            for rows in ROWS:
                if rows * inputs > 40_000:
                    continue
                call = Call(module, source, target, rows, inputs, outputs)
                before = call.out.clone()
                call.run(overlap=rows == 2, blocks=BLOCKS if outputs > 100 else 3)
                got, want = call.out.double(), call.want(before)
                error = ((got - want).norm() / want.norm()).item()
                report.check(f"{call.name} {rows}x{inputs}x{outputs}", error < (5e-3 if target != "f32" else 2e-3),
                             f"relative error {error:.2e}")
                # A row's bits are the same alone.
                one = Call(module, source, target, 1, inputs, outputs)
                one.x, one.weights, one.norm, one.bias = call.x[-1:].contiguous(), call.weights, call.norm, call.bias
                one.out = before[-1:].clone()
                one.run()
                report.equal(f"{call.name} {rows}x{inputs}x{outputs} alone", one.out[0], call.out[-1])


def replay_us(work, count):
    """Median microseconds of one of `count` calls of a graph."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return sorted(times)[len(times) // 2]


def bench(module):
    shapes = {"qwen3-0.6b": (1024, [("normed", "bf16", 1024, 4096), ("plain", "add", 2048, 1024),
                                    ("normed", "silu", 1024, 3072), ("plain", "add", 3072, 1024)]),
              "llama-3.1-8b": (4096, [("normed", "bf16", 4096, 6144), ("plain", "add", 4096, 4096),
                                      ("normed", "silu", 4096, 14336), ("plain", "add", 14336, 4096)])}
    for model, (_, products) in shapes.items():
        for rows in ROWS:
            print(f"{model}, {rows} rows: us and TB/s of weights")
            total = [0.0, 0.0, 0.0]
            for source, target, inputs, outputs in products:
                if rows * inputs > 40_000:
                    continue
                height = outputs * (2 if target == "silu" else 1)
                megabytes = 2 * inputs * height / 2**20
                copies = max(4, int(512 / megabytes))
                call = Call(module, source, target, rows, inputs, outputs, copies)
                ours = replay_us(lambda: call.run(True, False), copies)
                apart = replay_us(lambda: call.run(False, False), copies)
                x = call.x.to(torch.bfloat16)
                turn = [0]

                def theirs():
                    turn[0] += 1
                    return torch.nn.functional.linear(x, call.weights[turn[0] % copies])

                library = replay_us(theirs, copies)
                rate = lambda us: 2 * inputs * height / us / 1e6
                print(f"  {source}-{target} {inputs}x{height}: overlapping {ours:.1f} ({rate(ours):.2f}), apart "
                      f"{apart:.1f} ({rate(apart):.2f}), torch {library:.1f} ({rate(library):.2f})")
                total = [t + us for t, us in zip(total, (ours, apart, library))]
            print("  layer: overlapping {:.1f}, apart {:.1f}, torch {:.1f}".format(*total), flush=True)


if __name__ == "__main__":
    report, module = Report(), Module(sys.argv[2] if len(sys.argv) > 2 else "gemv.cu")
    check(report, module)
    print(f"gemv: {report.passed} checks passed, {report.failed} failed", flush=True)
    if "bench" in sys.argv:
        bench(module)
    sys.exit(report.failed > 0)
