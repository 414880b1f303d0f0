"""Launches the attention kernels through the CUDA driver on tensors of torch, and computes what they should answer.

The launch geometry and the workspace sizes are those that the comments of the kernels state.
"""
import ctypes
import math

import torch

from instances import BEHIND, ELEMENT, compile_kernel, decode_geometry

DTYPE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "E4M3": torch.float8_e4m3fn, "I8": torch.int8}
cuda = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {text.value.decode() if text.value else code}")


POINTERS = "q out k v seat span len token_start table partial counter".split()
LONGS = "page_stride head_stride slot_stride q_stride out_stride".split()
WORDS = "rows tokens kv_heads group page_size table_stride window causal min_span chunk pages seats".split()
FLOATS = "scale softcap k_scale v_scale".split()


class Args(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_void_p) for n in POINTERS] + [(n, ctypes.c_int64) for n in LONGS]
                + [(n, ctypes.c_uint32) for n in WORDS] + [(n, ctypes.c_float) for n in FLOATS])


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
                + [("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)])


PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Kernel:
    """One instance, loaded."""

    overlap = True  # attention_decode is launched so that it may begin before the kernel in front of it ends

    def __init__(self, file, defines, arch="sm_90a"):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.defines, self.name = defines, file[:-3]
        cubin, self.log = compile_kernel(file, defines, arch)
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.module = module
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "load")
        check(cuda.cuModuleGetFunction(ctypes.byref(self.function), module, self.name.encode()), "function")
        self.limit = 0

    def launch(self, args, grid, threads, shared):
        if shared > self.limit:
            check(cuda.cuFuncSetAttribute(self.function, 8, shared), f"{shared} bytes of shared memory")
            self.limit = shared
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(args), ctypes.c_void_p))
        overlap = Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        overlap.value[0] = 1
        config = Config(*grid, threads, 1, 1, shared, torch.cuda.current_stream().cuda_stream, ctypes.pointer(overlap),
                        int(self.overlap and self.name == "attention_decode"))
        check(cuda.cuLaunchKernelEx(ctypes.byref(config), self.function, parameters, None), "launch")

    def run(self, step, args):
        head_dim = self.defines["HEAD_DIM"]
        if self.name == "attention_decode":
            warps, stages, row = decode_geometry(self.defines)
            tile = self.defines["GROUP_TILE"]
            shared = warps * stages * (2 * (16 * row + 128) + 8) + warps * (tile * 8 + 1024) + 4 * (args.rows + 1) + 512
            shared += 8192 if head_dim == 256 and tile == 16 else 0
            self.launch(args, (step.blocks, 1, 1), 32 * warps, shared)
        elif self.name == "attention_prefill":
            block = 64 if head_dim == 256 else 128
            grid = (-(-args.tokens * args.group // block) + args.rows, args.kv_heads, 1)
            scales = 1024 if self.defines["KV_TYPE"] == "KV_I8" else 0
            self.launch(args, grid, 128, 2 * head_dim * (block + 256) + 1024 + scales)
        else:
            self.launch(args, (max(args.tokens, 1), args.kv_heads * args.group, 1), 128, 0)


class Step:
    """A pool of pages and the rows of one step over it; contents random, everything that must not be read NaN."""

    def __init__(self, lens, spans, head_dim=128, kv="BF16", q="BF16", kv_heads=8, group=4, page=16, layers=1, layout="hnd", window=0,
                 causal=1, softcap=0.0, chunk=0, blocks=None, min_span=1, seed=0, sharp=1.0, poison=True, shuffled=True, device="cuda"):
        self.__dict__.update(locals())
        rng = torch.Generator().manual_seed(seed)
        self.rows, rows = len(lens), len(lens)
        self.blocks = blocks or torch.cuda.get_device_properties(0).multi_processor_count
        need = [-(-n // page) for n in lens]
        pages = sum(need) + 1
        order = (torch.randperm(pages - 1, generator=rng) + 1 if shuffled else torch.arange(1, pages)).tolist()
        width = max(need) + 2
        seats = torch.randperm(rows + 3, generator=rng)[:rows]
        table = torch.full((rows + 3, width), -1 if poison else 0, dtype=torch.int32)
        at = 0
        for r in range(rows):
            table[seats[r], :need[r]] = torch.tensor(order[at:at + need[r]], dtype=torch.int32)
            at += need[r]
        element = DTYPE[kv]
        row = head_dim + BEHIND.get(kv, 0)
        inner = (kv_heads, page, row) if layout == "hnd" else (page, kv_heads, row)
        self.bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ELEMENT[kv]]
        if poison:
            # All bits set are no number in any of the types, but for e4m3; a scale of them is none either.
            fill = {"E4M3": 0x7f, "I8": 0xff}.get(kv, -1)
            pool = torch.full((pages, layers, 2) + inner, fill, dtype=self.bits, device=device)
        elif kv == "E4M3":
            pool = torch.randint(0, 112, (pages, layers, 2) + inner, dtype=torch.uint8, device=device)
        elif kv == "I8":
            pool = torch.randint(0, 256, (pages, layers, 2) + inner, dtype=torch.uint8, device=device)
            scale = torch.tensor([0.02], device=device).view(torch.uint8)
            pool[..., head_dim:] = scale
        else:
            pool = torch.empty((pages, layers, 2) + inner, dtype=element, device=device).normal_().view(self.bits)
        self.pool = pool
        view = pool if layout == "hnd" else pool.transpose(3, 4)  # [page, layer, k|v, head, slot, dim]
        self.view, self.layer = view, layers - 1
        strides = view.stride()
        self.k_scale, self.v_scale = (0.5, 0.25) if kv == "E4M3" else (1.0, 1.0)
        self.contents = []
        if poison:
            for r in range(rows):
                n, first = lens[r], 0
                if window:
                    first = max(0, n - spans[r] + 1 - window)
                    table[seats[r], :first // page] = -1
                kv_rows = torch.randn((2, n, kv_heads, head_dim), generator=rng).to(device)
                kv_rows = self.scaled(kv_rows) if kv == "I8" else kv_rows.to(element)
                self.contents.append(kv_rows)
                if n > first:
                    positions = torch.arange(first, n)
                    where = table[seats[r], positions // page].long().to(device)
                    slots = (positions % page).to(device)
                    bits = kv_rows.view(self.bits)[:, first:]
                    for i in range(2):
                        self.view[where, self.layer, i, :, slots] = bits[i]
        self.tokens = sum(spans)
        heads = kv_heads * group
        self.q = (torch.randn((self.tokens + 2, heads, head_dim), generator=rng) * sharp).to(DTYPE[q]).to(device)
        self.out = torch.full_like(self.q, math.nan)
        column = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        starts = [sum(spans[:r]) for r in range(rows)]
        self.starts, self.seat, self.table = starts, seats.int().to(device), table.to(device)
        self.span, self.len, self.token_start = column(spans), column(lens), column(starts)
        self.scale = head_dim ** -0.5
        tile = 8 if group <= 8 else 16
        parts = rows * kv_heads * max(1, -(-max(lens) // chunk)) if chunk else 16 * self.blocks
        self.partial = torch.full((max(parts, 1) * tile * (head_dim + 2),), math.nan, device=device)
        self.counter = torch.zeros(max(rows * kv_heads, 8 * self.blocks) + 2, dtype=torch.int32, device=device)
        self.strides = {"page_stride": strides[0], "head_stride": strides[3], "slot_stride": strides[4]}

    @staticmethod
    def scaled(rows):
        """Rows of int8 with the scale of each behind it, as bytes."""
        step = rows.abs().amax(-1, keepdim=True) / 127
        scale = step.flatten().view(torch.uint8).view(*rows.shape[:-1], 4)  # of one head its stride would be 0
        return torch.cat([(rows / step).round().to(torch.int8).view(torch.uint8), scale], -1)

    def held(self, rows):
        """What rows as they are stored stand for, in float64."""
        if self.kv != "I8":
            return rows.double()
        return rows[..., :self.head_dim].view(torch.int8).double() * rows[..., self.head_dim:].flatten().view(torch.float32).double().view(*rows.shape[:-1], 1)

    def args(self, layer=None):
        layer = self.layer if layer is None else layer
        p = lambda t: t.data_ptr()
        heads = self.kv_heads * self.group
        return Args(q=p(self.q), out=p(self.out), k=p(self.view[0, layer, 0]), v=p(self.view[0, layer, 1]), seat=p(self.seat),
                    span=p(self.span), len=p(self.len), token_start=p(self.token_start), table=p(self.table), partial=p(self.partial),
                    counter=p(self.counter), q_stride=heads * self.head_dim, out_stride=heads * self.head_dim, rows=self.rows,
                    tokens=self.tokens, kv_heads=self.kv_heads, group=self.group, page_size=self.page,
                    table_stride=self.table.shape[1], window=self.window, causal=self.causal, min_span=self.min_span,
                    chunk=self.chunk, pages=self.pool.shape[0], seats=self.table.shape[0], scale=self.scale, softcap=self.softcap, k_scale=self.k_scale, v_scale=self.v_scale, **self.strides)

    def reference(self, r):
        """Row r in float64: [span, heads, head_dim]."""
        n, span, first = self.lens[r], self.spans[r], self.starts[r]
        q = self.q[first:first + span].double()
        if n == 0:
            return torch.zeros_like(q)
        k = self.held(self.contents[r][0]) * self.k_scale
        v = self.held(self.contents[r][1]) * self.v_scale
        k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
        logits = torch.einsum("shd,nhd->hsn", q, k) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        position = (n - span + torch.arange(span, device=q.device))[:, None]
        token = torch.arange(n, device=q.device)[None, :]
        seen = torch.ones((span, n), dtype=torch.bool, device=q.device)
        if self.causal:
            seen &= token <= position
        if self.window:
            seen &= token > position - self.window
        logits = logits.masked_fill(~seen, -math.inf)
        return torch.einsum("hsn,nhd->shd", torch.softmax(logits, dim=-1), v)

    def verify(self, taken, limit):
        """The worst relative error over the rows taken; raises when it is above limit, or a wrong token was written."""
        worst = 0.0
        untouched = torch.ones(self.tokens + 2, dtype=torch.bool)
        for r in range(self.rows):
            span, first = self.spans[r], self.starts[r]
            if not taken(span):
                continue
            untouched[first:first + span] = False
            out, ref = self.out[first:first + span].double(), self.reference(r)
            if self.lens[r] == 0:
                assert (out == 0).all(), f"row {r} of len 0 is not 0"
                continue
            error = ((out - ref).norm() / ref.norm()).item()
            # Per query and head too, so that a single bad one can't hide in a long row.
            single = ((out - ref).norm(dim=-1) / ref.norm(dim=-1)).max().item()
            assert error < limit and single < 3 * limit, f"row {r} (len {self.lens[r]}, span {span}): relative error {error}, {single}"
            worst = max(worst, error)
        assert self.out[untouched.to(self.out.device)].isnan().all(), "a token of another row was written"
        assert not self.counter.any(), "a counter was left"
        return worst
