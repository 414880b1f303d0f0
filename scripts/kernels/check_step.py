#!/usr/bin/env python3
"""A whole decode step in one launch (decode_step.cu) against float64, and its time, on a GPU.

Weights, caches and lengths are new in every run; logits are poisoned, and so is what a stream's pages hold behind its end.
"""

import ctypes
import math
import sys

import torch

from launch import Module, Report, median_us

POINTERS = ("weights embed norm head logits ids sampled keys seat len page slot position table phases words step").split()
LONGS = "layer_stride page_stride kv_stride head_stride slot_stride".split()
WORDS = ("rows layers hidden kv_heads ffn vocab samples pages page_size table_stride seats window stages is_gelu").split()
FLOATS = "eps scale embed_scale".split()
WARPS, TILES, STAGE, MOST_ROWS, THREADS = 8, 6, 8 * (2048 + 64), 8, 288
BLOCKS = torch.cuda.get_device_properties(0).multi_processor_count
ROOM = 227 << 10


class Args(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_uint64) for n in POINTERS] + [(n, ctypes.c_int64) for n in LONGS]
                + [(n, ctypes.c_uint32) for n in WORDS] + [(n, ctypes.c_float) for n in FLOATS])


class Shape:
    def __init__(self, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, qk_norm=True, bias=False, window=0, tanh=False):
        self.__dict__.update(locals())
        self.group, self.q, self.kv = heads // kv_heads, heads * head_dim, kv_heads * head_dim

    def blocks(self):
        return min(BLOCKS, self.ffn // 8)

    def shared_bytes(self, rows):
        """Without the ring."""
        x = rows * (-(-2 * max(self.hidden, self.q, self.ffn) // 128) * 128 + 64)
        part = WARPS * self.group * (self.head_dim + 2) + 3 * self.group * self.head_dim
        sums = 4 * max(2 * WARPS * rows * 8 * TILES, part) + 4 * (self.group + 2) * self.head_dim
        own = 4 * -(-self.hidden // 8 // self.blocks()) * 8 * rows
        return x + sums + own + rows * self.head_dim * 4

    def words(self):
        parts = max(self.blocks(), 1) * self.group * (self.head_dim + 2)
        return MOST_ROWS * (self.hidden + (self.q + 2 * self.kv) // 2 + self.q // 2 + self.ffn // 2) + parts


def matrix(outputs, inputs):
    return (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).bfloat16()


class Model:
    def __init__(self, shape):
        s = self.shape = shape
        near_one = lambda n: 1 + 0.1 * torch.randn(n, device="cuda")
        self.layers = []
        for _ in range(s.layers):
            self.layers.append({
                "attn_norm": near_one(s.hidden), "qkv": matrix(s.q + 2 * s.kv, s.hidden),
                "bias": 0.3 * torch.randn(s.q + 2 * s.kv, device="cuda") if s.bias else None,
                "q_norm": near_one(s.head_dim) if s.qk_norm else None, "k_norm": near_one(s.head_dim) if s.qk_norm else None,
                "o": matrix(s.hidden, s.q), "ffn_norm": near_one(s.hidden), "gate_up": matrix(2 * s.ffn, s.hidden),
                "down": matrix(s.hidden, s.ffn)})
        address = lambda t: 0 if t is None else t.data_ptr()
        self.pointers = torch.tensor([[address(t) for t in layer.values()] for layer in self.layers], dtype=torch.int64, device="cuda")
        self.embed, self.norm = torch.randn(s.vocab, s.hidden, device="cuda").bfloat16(), near_one(s.hidden)
        self.head = matrix(s.vocab, s.hidden)
        phases = [int(2**64 * (1e6 ** (-2 * i / s.head_dim)) / (2 * math.pi)) for i in range(s.head_dim // 2)]
        self.phases = torch.tensor([p - 2**64 if p >= 2**63 else p for p in phases], dtype=torch.int64, device="cuda")
        self.turns = [p / 2**64 for p in phases]
        self.words = torch.zeros(s.words(), dtype=torch.int64, device="cuda")
        self.step = torch.zeros(1, dtype=torch.int32, device="cuda")


class Step:
    """Streams of these lengths, this step's token included."""

    def __init__(self, model, lens, page=16):
        s, self.model, self.lens, self.page_size = model.shape, model, lens, page
        rows, need = len(lens), [-(-n // page) for n in lens]
        pages = sum(need) + 1
        width = max(need) + 1
        order = (torch.randperm(pages - 1) + 1).tolist()
        self.pool = torch.full((pages, s.layers, 2, s.kv_heads, page, s.head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        seats = torch.randperm(rows + 2)[:rows].tolist()
        table, place, at = torch.full((rows + 2, width), -1, dtype=torch.int32), [], 0
        for r, n in enumerate(lens):
            mine = order[at:at + need[r]]
            at += need[r]
            table[seats[r], :need[r]] = torch.tensor(mine, dtype=torch.int32)
            for t in range(0, n - 1, page):
                count = min(page, n - 1 - t)
                self.pool[mine[t // page], :, :, :, :count] = torch.randn(s.layers, 2, s.kv_heads, count, s.head_dim, device="cuda").bfloat16()
            place.append((mine[(n - 1) // page], (n - 1) % page))
        self.pages_of = [table[seats[r], :need[r]].long().cuda() for r in range(rows)]
        column = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")
        self.table, self.seat, self.len = table.cuda(), column(seats), column(lens)
        self.page, self.slot = column([p for p, _ in place]), column([t for _, t in place])
        self.positions = [n - 1 + 3 for n in lens]
        self.position, self.place = column(self.positions), place
        self.ids = torch.randint(0, s.vocab, (rows,), dtype=torch.int32, device="cuda")
        self.logits = torch.full((rows, s.vocab), float("nan"), device="cuda")

    def args(self):
        m, s = self.model, self.model.shape
        p = lambda t: t.data_ptr()
        strides = self.pool.stride()
        stages = min(16, (ROOM - 1024 - s.shared_bytes(len(self.lens))) // STAGE)
        return Args(weights=p(m.pointers), embed=p(m.embed), norm=p(m.norm), head=p(m.head), logits=p(self.logits), ids=p(self.ids),
                    sampled=0, keys=p(self.pool), seat=p(self.seat), len=p(self.len), page=p(self.page), slot=p(self.slot),
                    position=p(self.position), table=p(self.table), phases=p(m.phases), words=p(m.words), step=p(m.step),
                    layer_stride=strides[1], page_stride=strides[0], kv_stride=strides[2], head_stride=strides[3], slot_stride=strides[4],
                    rows=len(self.lens), layers=s.layers, hidden=s.hidden, kv_heads=s.kv_heads, ffn=s.ffn, vocab=s.vocab, samples=0,
                    pages=self.pool.shape[0], page_size=self.page_size, table_stride=self.table.shape[1], seats=self.table.shape[0],
                    window=s.window, stages=stages, is_gelu=int(s.tanh), eps=1e-6, scale=s.head_dim**-0.5, embed_scale=1.0)

    def run(self, module):
        s, args = self.model.shape, self.args()
        module.launch(f"decode_step_{1 if len(self.lens) == 1 else 4 if len(self.lens) <= 4 else 8}", s.blocks(), THREADS, args, shared=args.stages * STAGE + s.shared_bytes(len(self.lens)),
                      cooperative=True)

    def reference(self):
        """Logits in float64, and keys and values of every layer: [layers, 2, rows, kv heads, head dim]."""
        m, s, rows = self.model, self.model.shape, len(self.lens)
        norm = lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
        x = m.embed[self.ids.long()].double()
        angle = torch.tensor([[2 * math.pi * math.fmod(p * t, 1.0) for t in m.turns] for p in self.positions], dtype=torch.float64, device="cuda")
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turned(h):
            a, b = h.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        written = []
        for number, layer in enumerate(m.layers):
            qkv = norm(x, layer["attn_norm"]) @ layer["qkv"].double().T
            if layer["bias"] is not None:
                qkv = qkv + layer["bias"].double()
            q, k, v = qkv.split([s.q, s.kv, s.kv], -1)
            q, k, v = q.view(rows, s.heads, -1), k.view(rows, s.kv_heads, -1), v.view(rows, s.kv_heads, -1)
            if s.qk_norm:
                q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
            q, k = turned(q), turned(k)
            written.append(torch.stack([k, v]))
            out = []
            for r, n in enumerate(self.lens):
                old = self.pool[self.pages_of[r], number].permute(1, 2, 0, 3, 4).reshape(2, s.kv_heads, -1, s.head_dim)[:, :, :n - 1].double()
                keys, values = torch.cat([old[0], k[r][:, None]], 1), torch.cat([old[1], v[r][:, None]], 1)
                first = max(0, n - s.window) if s.window else 0
                keys, values = (t[:, first:].repeat_interleave(s.group, 0) for t in (keys, values))
                p = torch.softmax(torch.einsum("hd,hnd->hn", q[r], keys) * s.head_dim**-0.5, -1)
                out.append(torch.einsum("hn,hnd->hd", p, values).reshape(-1))
            x = x + torch.stack(out) @ layer["o"].double().T
            gate, up = (norm(x, layer["ffn_norm"]) @ layer["gate_up"].double().T).chunk(2, -1)
            f = torch.nn.functional
            gate = f.gelu(gate, approximate="tanh") if s.tanh else f.silu(gate)
            x = x + (gate * up) @ layer["down"].double().T
        return norm(x, m.norm) @ m.head.double().T, torch.stack(written)

    def written(self):
        return torch.stack([self.pool[page, :, :, :, slot] for page, slot in self.place], 2).double()


SHAPES = {
    "qwen3-0.6b": lambda layers: Shape(layers, 1024, 16, 8, 128, 3072, 151936),
    "smollm2-135m": lambda layers: Shape(layers, 576, 9, 3, 64, 1536, 49152, qk_norm=False),
    "llama-3.2-1b": lambda layers: Shape(layers, 2048, 32, 8, 64, 8192, 128256, qk_norm=False),
    "llama-3.1-8b": lambda layers: Shape(layers, 4096, 32, 8, 128, 14336, 128256, qk_norm=False),
    "small": lambda layers: Shape(layers, 96, 3, 3, 64, 160, 517, bias=True, window=40, tanh=True),
}


def module_for(shape, **defines):
    return Module("decode_step.cu", HEAD_DIM=shape.head_dim, GROUP=shape.group, NARROW=int(shape.hidden <= 1024), **defines)


def relative(got, want):
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item()


def check(report, name, layers, lens, page=16):
    model = Model(SHAPES[name](layers))
    module = module_for(model.shape)
    step = Step(model, lens, page)
    want, keys = step.reference()
    step.run(module)
    torch.cuda.synchronize()
    what = f"{name} {layers} layers {lens}"
    error, cache = relative(step.logits.double(), want), relative(step.written(), keys)
    report.check(what, error < 2e-2 and cache < 2e-2, f"logits {error:.2e}, cache {cache:.2e}")
    first = step.logits.clone()
    for _ in range(3):
        step.logits.fill_(float("nan"))
        step.run(module)
    torch.cuda.synchronize()
    report.equal(f"{what} again", step.logits, first)
    print(f"{what}: logits {error:.1e}, cache {cache:.1e}", flush=True)


def bench(name, variants, rows_and_lens):
    model = Model(SHAPES[name]({"qwen3-0.6b": 28, "smollm2-135m": 30, "llama-3.2-1b": 16, "llama-3.1-8b": 32}[name]))
    weights = sum(t.numel() * 2 for layer in model.layers for t in (layer["qkv"], layer["o"], layer["gate_up"], layer["down"]))
    weights += model.head.numel() * 2
    for rows, length in rows_and_lens:
        step = Step(model, [length] * rows)
        for label, defines in variants.items():
            us = median_us(lambda: step.run(module_cache(model.shape, defines)), 20)
            cache = rows * length * model.shape.kv * 4 * model.shape.layers
            print(f"{name} B={rows} L={length} {label}: {us:.1f} us, {(weights + cache) / us / 1e6:.2f} TB/s, "
                  f"{rows * 1e6 / us:.0f} tokens/s", flush=True)


_modules = {}


def module_cache(shape, defines):
    key = (shape.head_dim, shape.group, shape.hidden <= 1024, tuple(defines.items()))
    if key not in _modules:
        _modules[key] = module_for(shape, **defines)
    return _modules[key]


if __name__ == "__main__":
    report = Report()
    check(report, "small", 1, [1])
    check(report, "small", 2, [5, 100, 33])
    check(report, "qwen3-0.6b", 1, [1])
    check(report, "qwen3-0.6b", 2, [160])
    check(report, "qwen3-0.6b", 3, [17, 900, 4000, 1, 64], 64)
    check(report, "smollm2-135m", 4, [300, 20])
    check(report, "smollm2-135m", 2, [700] * 8)
    check(report, "smollm2-135m", 2, [700, 3, 129, 40])
    check(report, "llama-3.2-1b", 2, [513, 100, 3])
    check(report, "llama-3.1-8b", 2, [2049, 77])
    check(report, "qwen3-0.6b", 28, [160])
    print(f"decode_step: {report.passed} checks passed, {report.failed} failed", flush=True)
    if "bench" in sys.argv:
        torch.cuda.empty_cache()
        bench("qwen3-0.6b", {"": {}}, [(1, 160), (1, 4096), (2, 160), (4, 160), (8, 160)])
        bench("llama-3.1-8b", {"": {}}, [(1, 160), (8, 160)])
    sys.exit(report.failed > 0)
