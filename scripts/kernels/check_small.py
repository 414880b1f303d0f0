#!/usr/bin/env python3
"""Norm, rope, cache and elementwise kernels against float64, on a GPU.

Inputs are new in every run, outputs poisoned with NaN before each.
"""

import sys

import torch

from launch import Module, Report, f32, i64, median_us, u32

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16,
          "fp8": torch.float8_e4m3fn}
# Half a unit in the last place, relative.
HALF = {"bf16": 2.0**-8, "f32": 2.0**-24, "f16": 2.0**-11}


def random(*shape, name="f32", scale=1.0):
    return (torch.randn(*shape, device="cuda", dtype=torch.float64) * scale).to(DTYPES[name])


def poisoned(*shape, name="f32"):
    return torch.full(shape, float("nan"), device="cuda", dtype=torch.float32).to(DTYPES[name])


def norm_of(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def threads_for(width):
    return min(1024, (width // 8 + 31) // 32 * 32)


def check_norm(report):
    module, eps = Module("norm.cu"), 1e-5
    for width in [8, 64, 264, 576, 2048, 4096, 5120, 8192, 16384]:
        threads = threads_for(width)
        for rows in [1, 3, 37]:
            weight, post = random(width), random(width)
            for source, target in [("bf16", "bf16"), ("f32", "bf16"), ("f32", "f32")]:
                x = random(rows, width + 16, name=source)[:, :width]
                out = poisoned(rows, width, name=target)
                call = lambda x, out: module.launch(
                    f"rms_norm_{source}_{target}", x.shape[0], threads, x, i64(width + 16), weight,
                    out, i64(width), u32(width), f32(eps))
                call(x, out)
                report.near(f"rms_norm {source} {target} {rows}x{width}", out,
                            norm_of(x, weight, eps), HALF[target] * 1.02 + 2e-6)
                alone = poisoned(1, width, name=target)
                call(x[rows - 1:], alone)
                report.equal(f"rms_norm alone {source} {width}", alone[0], out[rows - 1])
            for kept, name in [("bf16", "bf16"), ("f32", "bf16"), ("f32", "f32")]:
                for use_post, use_weight in [(0, 1), (1, 1), (1, 0)]:
                    residual, x = random(rows, width, name=kept), random(rows, width, name=name)
                    out, before = poisoned(rows, width, name=name), residual.double()
                    module.launch(f"add_rms_norm_{kept}_{name}", rows, threads, residual, x,
                                  post if use_post else None, weight if use_weight else None, out,
                                  u32(width), f32(eps))
                    added = norm_of(x, post, eps) if use_post else x.double()
                    what = f"add_rms_norm {kept} {name} {rows}x{width} {use_post}{use_weight}"
                    report.near(what + " sum", residual, before + added, HALF[kept] * 1.02, 1e-5)
                    if use_weight:
                        report.near(what, out, norm_of(residual, weight, eps),
                                    HALF[name] * 1.02 + 2e-6)
    for name in ["bf16", "f32"]:
        for heads, dim in [(1, 8), (3, 64), (32, 128), (5, 256), (2, 80)]:
            lanes = 1
            while lanes * 8 < dim:
                lanes *= 2
            tokens, stride = 13, heads * dim + 32
            x, weight = random(tokens, stride, name=name), random(dim)
            heads_of = lambda t: t[:, :heads * dim].reshape(tokens, heads, dim)
            want, rest = norm_of(heads_of(x), weight, eps), x[:, heads * dim:].clone()
            module.launch(f"head_norm_{name}", -(-tokens * heads * lanes // 256), 256, x, i64(stride),
                          i64(dim), weight, u32(tokens), u32(heads), u32(dim), u32(lanes), f32(eps))
            report.near(f"head_norm {name} {heads}x{dim}", heads_of(x), want, HALF[name] * 1.02 + 2e-6)
            report.equal(f"head_norm {name} rest", x[:, heads * dim:], rest)


def phases_of(frequencies):
    """Turns a position in units of 2^-64."""
    turns = (frequencies / (2 * torch.pi)).remainder(1.0)
    whole = [int(t * 2**64) % 2**64 for t in turns.tolist()]
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in whole], dtype=torch.int64).cuda()


def rotated(x, positions, frequencies, interleaved):
    """x [tokens, heads, dim] in float64."""
    x, pairs = x.double().clone(), len(frequencies)
    angle = positions.double().cpu()[:, None] * frequencies[None, :]
    cos, sin = angle.cos().cuda()[:, None], angle.sin().cuda()[:, None]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
    return x


def frequencies_of(pairs, theta=500000.0):
    return theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def positions_for(tokens):
    positions = torch.randint(0, 1 << 20, (tokens,), dtype=torch.int32)
    positions[:4] = torch.tensor([0, 1, 131072, 1048575])
    return positions.cuda()


def check_rope(report):
    module = Module("rope.cu")
    tokens, positions = 19, positions_for(19)
    for name in ["bf16", "f32"]:
        for dim, pairs in [(64, 32), (128, 64), (80, 40), (80, 16), (256, 128), (6, 2), (34, 17)]:
            for interleaved in [0, 1]:
                q_heads, k_heads = 7, 3
                frequencies = frequencies_of(pairs)
                wide = int(dim % 16 == 0 and pairs % 8 == 0)
                q = random(tokens, q_heads + k_heads + 1, dim, name=name)
                k, q_want = q[:, q_heads:q_heads + k_heads], None
                want = rotated(q, positions, frequencies, interleaved)
                want[:, q_heads + k_heads:] = q[:, q_heads + k_heads:].double()
                items = (q_heads + k_heads) * (pairs // 8 if wide else pairs)
                stride = i64((q_heads + k_heads + 1) * dim)
                module.launch(f"rope_{name}", (tokens, -(-items // 128)), 128, q, stride, i64(dim),
                              u32(q_heads), k, stride, i64(dim), u32(k_heads), positions,
                              phases_of(frequencies), u32(pairs), u32(dim), u32(interleaved),
                              u32(wide))
                report.near(f"rope {name} {dim}/{pairs} {interleaved}", q, want,
                            HALF[name] * 1.02, 2e-6)


class Cache:
    """A paged layer [pages][k, v][heads][slots][dim]."""

    def __init__(self, pages, heads, slots, dim, name):
        self.data = poisoned(pages, 2, heads, slots, dim, name=name)
        kv = heads * slots * dim
        self.args = [self.data, i64(2 * kv), i64(kv), i64(slots * dim), i64(dim), u32(pages),
                     u32(slots)]

    def rows(self, page, slot):
        """k, v [tokens, heads, dim]."""
        data = self.data.view(torch.uint8).view(self.data.dtype)
        if self.data.dtype == torch.float8_e4m3fn:
            data = self.data.float()
        return (data[page, which, :, slot] for which in (0, 1))


def places_for(tokens, pages, slots):
    order = torch.randperm(pages * slots)[:tokens]
    as_u32 = lambda x: x.to(torch.int32).cuda()
    return as_u32(order // slots), as_u32(order % slots)


def check_kv(report):
    module, tokens, pages = Module("kv.cu"), 21, 5
    kinds = [(a, c) for a in ["bf16", "f32"] for c in ["bf16", "f16", "f32", "fp8"]] + [("f16", "f16")]
    for name, stored in kinds:
        for heads, dim, slots in [(2, 64, 16), (3, 128, 7), (1, 80, 16), (2, 6, 16)]:
            wide = int(dim % 8 == 0)
            page, slot = places_for(tokens, pages, slots)
            at = (page.long(), slot.long())
            kv = random(tokens, 2 * heads, dim, name=name, scale=100.0 if stored == "fp8" else 1.0)
            k, v = kv[:, :heads], kv[:, heads:]
            cache, what = Cache(pages, heads, slots, dim, stored), f"{name} {stored} {heads}x{dim}"
            stride = i64(2 * heads * dim)
            items = 2 * heads * (dim // 8 if wide else dim)
            module.launch(f"kv_write_{name}_{stored}", (tokens, -(-items // 128)), 128, k, stride,
                          i64(dim), v, stride, i64(dim), page, slot, *cache.args, u32(heads),
                          u32(dim), u32(wide))
            limit = 448.0 if stored == "fp8" else float("inf")
            for got, want, which in zip(cache.rows(*at), (k, v), "kv"):
                want = want.float().clamp(-limit, limit).to(DTYPES[stored])
                report.equal(f"kv_write {what} {which}", got.float(), want.float())
            untouched = torch.ones(pages, slots, dtype=torch.bool, device="cuda")
            untouched[at] = False
            left = cache.data.float().permute(0, 3, 1, 2, 4)[untouched]
            report.check(f"kv_write {what} leaves the rest", left.isnan().all().item())
            if name == "f16":
                continue
            back = poisoned(2, tokens, heads, dim)
            module.launch(f"kv_read_{stored}", (tokens, -(-2 * heads * dim // 256)), 256, back[0],
                          back[1], page, slot, *cache.args, u32(heads), u32(dim))
            for got, want in zip(back, cache.rows(*at)):
                report.equal(f"kv_read {what}", got, want.float())
    check_rope_write(module, report)

    pool = torch.randint(0, 256, (9, 3, 1616), dtype=torch.uint8, device="cuda")
    for runs, run_bytes in [(1, 3 * 1616), (3, 1024)]:
        before, pairs = pool.clone(), torch.tensor([[1, 4], [2, 8], [1, 5]], dtype=torch.int32).cuda()
        module.launch("copy_pages", (3, 4), 256, pool, u32(9), pairs, i64(3 * 1616), u32(runs), i64(1616),
                      i64(run_bytes))
        for source, target in pairs.tolist():
            before[target, :, :] = torch.cat(
                [before[source][:, :run_bytes], before[target][:, run_bytes:]], 1) \
                if runs > 1 else before[source]
        report.equal(f"copy_pages {runs}", pool, before)
    table = torch.arange(5000, dtype=torch.int32).cuda()
    want, at = table.clone(), torch.randperm(5000)[:777].to(torch.int32).cuda()
    values = torch.randint(0, 1 << 30, (777,), dtype=torch.int32).cuda()
    want[at.long()] = values
    module.launch("table_apply", 4, 256, table, u32(5000), torch.stack([at, values], 1).contiguous(), u32(777))
    report.equal("table_apply", table, want)


def check_rope_write(module, report):
    tokens, pages, slots, positions, eps = 21, 5, 16, positions_for(21), 1e-6
    for name in ["bf16", "f32"]:
        for stored in ["bf16", "f16", "f32", "fp8"]:
            for q_heads, heads, dim, pairs in [(8, 2, 128, 64), (3, 3, 64, 32), (2, 1, 80, 16),
                                               (4, 2, 256, 128), (6, 2, 96, 48), (2, 2, 64, 0)]:
                for normed in [False, True]:
                    check_one_rope_write(module, report, name, stored, q_heads, heads, dim, pairs,
                                         normed, tokens, pages, slots, positions, eps)


def check_one_rope_write(module, report, name, stored, q_heads, heads, dim, pairs, normed, tokens,
                         pages, slots, positions, eps):
    interleaved, frequencies = int(normed), frequencies_of(max(pairs, 1))[:pairs]
    page, slot = places_for(tokens, pages, slots)
    width = (q_heads + 2 * heads) * dim
    all_heads = random(tokens, q_heads + 2 * heads, dim, name=name)
    before = all_heads.double()
    q, k, v = all_heads, all_heads[:, q_heads:], all_heads[:, q_heads + heads:]
    weights = [random(dim), random(dim)] if normed else [None, None]
    cache, lanes = Cache(pages, heads, slots, dim, stored), 1
    while lanes * 16 < dim:
        lanes *= 2
    grid = (tokens, -(-(q_heads + 2 * heads) * lanes // 128))
    module.launch(f"rope_write_{name}_{stored}", grid, 128, q, i64(width), u32(q_heads), k,
                  i64(width), v, i64(width), u32(heads), u32(dim), u32(lanes), *weights, f32(eps),
                  positions, phases_of(frequencies) if pairs else None, u32(pairs),
                  u32(interleaved), page, slot, *cache.args)
    ready = [before[:, :q_heads], before[:, q_heads:q_heads + heads]]
    if normed:
        ready = [norm_of(x, w, eps) for x, w in zip(ready, weights)]
    if pairs:
        ready = [rotated(x, positions, frequencies, interleaved) for x in ready]
    what = f"rope_write {name} {stored} {q_heads}/{heads}x{dim}/{pairs} {normed}"
    report.near(what + " q", all_heads[:, :q_heads], ready[0], HALF[name] * 1.02 + 2e-6, 5e-6)
    got = list(cache.rows(page.long(), slot.long()))
    half = 2.0**-4 if stored == "fp8" else HALF[stored]
    report.near(what + " k", got[0], ready[1], half * 1.02 + 2e-6, 1e-3 if stored == "fp8" else 5e-6)
    limit = 448.0 if stored == "fp8" else float("inf")
    v_want = before[:, q_heads + heads:].float().clamp(-limit, limit).to(DTYPES[stored]).float()
    report.equal(what + " v", got[1].float(), v_want)


def check_elementwise(report):
    module = Module("elementwise.cu")
    blocks = lambda items: -(-items // 256)
    for name in ["bf16", "f32"]:
        for rows, width in [(1, 8), (5, 1536), (64, 14336)]:
            x = random(rows, 2 * width, name=name, scale=4.0)
            gate, up = x[:, :width].double(), x[:, width:].double()
            for kernel, f in [("silu_mul", torch.nn.functional.silu),
                              ("gelu_tanh_mul",
                               lambda g: torch.nn.functional.gelu(g, approximate="tanh"))]:
                out = poisoned(rows, width, name=name)
                module.launch(f"{kernel}_{name}", blocks(rows * width // 8), 256, x, out, u32(rows),
                              u32(width))
                report.near(f"{kernel} {name} {rows}x{width}", out, f(gate) * up,
                            HALF[name] * 1.02 + 1e-5, 1e-6)
            y, bias = random(rows, width, name=name), random(width)
            want = y.double() + bias.double()
            module.launch(f"add_bias_{name}", blocks(rows * width // 8), 256, y, bias, u32(rows),
                          u32(width))
            report.near(f"add_bias {name}", y, want, HALF[name] * 1.02)
        for count in [1, 7, 8, 1003]:
            x = random(count, name=name, scale=30.0)
            want = x.double() * 0.3
            module.launch(f"scale_{name}", blocks(count), 256, x, i64(count), f32(0.3))
            report.near(f"scale {name} {count}", x, want, HALF[name] * 1.02 + 1e-7)
            want = 30.0 * (x.double() / 30.0).tanh()
            module.launch(f"soft_cap_{name}", blocks(count), 256, x, i64(count), f32(30.0))
            report.near(f"soft_cap {name} {count}", x, want, HALF[name] * 1.02 + 1e-6, 1e-6)
        for out_name in ["bf16", "f32"]:
            # The last three are samples 1, 0 (an id past the table), and one that there is not.
            ids = torch.tensor([3, 0, 99, 100, 2**31 - 1, 1 - 2**31, -2**31, 2 - 2**31],
                               dtype=torch.int32).cuda()
            sampled = torch.tensor([2**31 - 1, 42], dtype=torch.int32).cuda()
            table, out = random(100, 576, name=name), poisoned(8, 576, name=out_name)
            module.launch(f"embed_{name}_{out_name}", blocks(8 * 72), 256, ids, sampled, u32(2), table,
                          out, u32(8), u32(100), u32(576), f32(2.5))
            want = torch.zeros(8, 576, dtype=torch.float64, device="cuda")
            want[:3] = table[ids[:3].long()].double() * 2.5
            want[5] = table[42].double() * 2.5
            report.near(f"embed {name} {out_name}", out, want, HALF[out_name] * 1.02)
    for kept, name in [("bf16", "bf16"), ("f32", "bf16"), ("f32", "f32")]:
        for count in [5, 4096, 4099]:
            x, y = random(count, name=kept), random(count, name=name)
            want = x.double() + y.double()
            module.launch(f"add_{kept}_{name}", blocks(count), 256, x, y, i64(count))
            report.near(f"add {kept} {name}", x, want, HALF[kept] * 1.02)
    for source, target in [("f32", "bf16"), ("bf16", "f32"), ("f32", "f16"), ("f16", "f32"),
                           ("f16", "bf16")]:
        x, out = random(1003, name=source), poisoned(1003, name=target)
        module.launch(f"convert_{source}_{target}", blocks(126), 256, x, out, i64(1003))
        report.equal(f"convert {source} {target}", out, x.to(DTYPES[target]))
    x, out = random(40, 576, name="bf16"), random(4, 576, name="bf16")
    want, start, span = out.clone(), [0, 7, 7, 30], [7, 0, 23, 10]
    as_u32 = lambda v: torch.tensor(v, dtype=torch.int32).cuda()
    for r in [0, 2, 3]:
        want[r] = x[start[r] + span[r] - 1]
    module.launch("gather_last", blocks(4 * 72), 256, x, out, as_u32(start), as_u32(span), u32(40),
                  u32(4), i64(1152))
    report.equal("gather_last", out, want)
    module.launch("gather_rows", blocks(4 * 72), 256, x, out, as_u32([39, -1, 0, 5]), u32(4), i64(1152))
    want[0], want[2], want[3] = x[39], x[0], x[5]
    report.equal("gather_rows", out, want)


def times():
    """The kernels between the products of one layer: 32/8 heads of 128, width 4096, ffn 14336."""
    norm, kv, flat = Module("norm.cu"), Module("kv.cu"), Module("elementwise.cu")
    for tokens in [1, 64, 256, 2048]:
        x, out = random(tokens, 4096, name="bf16"), random(tokens, 4096, name="bf16")
        residual, weight = random(tokens, 4096, name="bf16"), random(4096)
        qkv = random(tokens, 48, 128, name="bf16")
        cache = Cache(tokens // 16 + 2, 8, 16, 128, "bf16")
        page, slot = places_for(tokens, tokens // 16 + 1, 16)
        positions, phases = positions_for(max(tokens, 4)), phases_of(frequencies_of(64))
        ffn, gated = random(tokens, 28672, name="bf16"), random(tokens, 14336, name="bf16")
        width = i64(48 * 128)
        works = {
            "add_rms_norm": lambda: norm.launch(
                "add_rms_norm_bf16_bf16", tokens, 512, residual, x, None, weight, out, u32(4096),
                f32(1e-5)),
            "rope_write": lambda: kv.launch(
                "rope_write_bf16_bf16", (tokens, 3), 128, qkv, width, u32(32), qkv[:, 32:], width,
                qkv[:, 40:], width, u32(8), u32(128), u32(8), None, None, f32(0), positions, phases,
                u32(64), u32(0), page, slot, *cache.args),
            "silu_mul": lambda: flat.launch("silu_mul_bf16", tokens * 14336 // 8 // 256, 256, ffn,
                                            gated, u32(tokens), u32(14336)),
        }
        print(f"tokens {tokens}: " + ", ".join(f"{n} {median_us(w):.1f} us" for n, w in works.items()))


def main():
    report = Report()
    for check in [check_norm, check_rope, check_kv, check_elementwise]:
        try:
            check(report)
        except Exception as e:  # the rest is worth knowing
            report.check(check.__name__, False, repr(e))
    torch.cuda.synchronize()
    times()
    print(f"small kernels: {report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
