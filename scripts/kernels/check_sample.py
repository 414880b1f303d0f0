#!/usr/bin/env python3
"""The sampling kernels against the CPU's definition written out in numpy: the same token, exactly."""

import sys

import numpy as np
import torch

from launch import Module, Report, i64, median_us, u32

UNITS = float(1 << 40)
ROW = np.dtype([("seed", "u8"), ("choice", "u4"), ("position", "u4"), ("temperature", "f4"),
                ("top_k", "u4"), ("top_p", "f4"), ("min_p", "f4"), ("penalty", "f4"), ("set", "u4"),
                ("unused", "u8")])
OUT = np.dtype([("token", "u4"), ("status", "u4"), ("logprob", "f4")])
NO_SET = 0xFFFFFFFF
f32 = np.float32


def fma(a, b, c):
    """Rounded once, but for what float64 cannot hold of the sum: one in 2^29."""
    return (a.astype("f8") * np.float64(b) + np.float64(c)).astype("f4")


def exp(x):
    """e^x as device::ops computes it, operation by operation."""
    x = np.where(x > f32(89), f32(89), x)
    x = np.where(x < f32(-104), f32(-104), x)
    n = np.rint(x * f32(1.44269504088896340736)).astype("i4")
    nf = n.astype("f4")
    r = fma(nf, f32(-0.6933594), x)
    r = fma(nf, f32(2.1219444e-4), r)
    p = np.full_like(x, f32(1.9875691e-4))
    for c in [1.3981999e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 5e-1]:
        p = (p.astype("f8") * r.astype("f8") + np.float64(f32(c))).astype("f4")
    rr = r * r
    p = (p.astype("f8") * rr.astype("f8") + r.astype("f8")).astype("f4") + f32(1)
    half = n >> 1
    power = lambda k: ((k + 127) << 23).astype("i4").view("f4")
    return (p * power(half)) * power(n - half)


def weights(x, best, temperature):
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.minimum(f32(1) / f32(temperature), np.finfo("f4").max)
        return exp(((x - f32(best)) * scale).astype("f4"))


def units(w):
    return (w.astype("f8") * UNITS).astype("u8")


def block_sums(w):
    """Sums of 256 in 16 lanes of float32, in units."""
    padded = np.zeros(-(-len(w) // 256) * 256, "f4")
    padded[:len(w)] = w
    lanes = np.zeros((len(padded) // 256, 16), "f4")
    for i in range(16):
        lanes = lanes + padded.reshape(-1, 16, 16)[:, i]
    for half in [8, 4, 2, 1]:
        lanes = lanes[:, :half] + lanes[:, half:]
    return units(lanes[:, 0])


def philox_bits(seed, choice, position):
    c, key, mask = [position, 0, choice, 0], [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for step in range(10):
        if step:
            key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
    return (c[0] << 32 | c[1]) >> 11


def token_of(row, how):
    """The chosen token; the row is a usable one."""
    best = row.max()
    if how["temperature"] == 0 or how["top_k"] == 1:
        return int(np.argmax(row))
    bits = philox_bits(int(how["seed"]), int(how["choice"]), int(how["position"]))
    w = weights(row, best, how["temperature"])
    u = units(w)
    sums = block_sums(w)
    total = int(sums.sum())
    if how["top_k"] == 0 and how["top_p"] == 1 and how["min_p"] == 0:
        target = bits * total >> 53
        running = np.cumsum(sums)
        block = int(np.argmax(running > target))
        own = u[block * 256:block * 256 + 256]
        within = np.cumsum(own) + (running[block] - sums[block])
        passed = np.flatnonzero(within > target)
        possible = np.flatnonzero(w[block * 256:block * 256 + 256] > 0)
        return block * 256 + int(passed[0] if len(passed) else possible[-1])
    ids = np.arange(len(row))
    order = np.lexsort((ids, -row.astype("f8")))
    order = order[row[order] > -np.inf]
    if how["top_k"] > 0:
        order = order[:how["top_k"]]
        whole = int(u[order].sum())
    elif how["top_p"] < 1:
        rest = (1.0 - np.float64(how["top_p"])) * (np.float64(total) / UNITS) / len(row)
        order = order[w[order].astype("f8") > rest]
        whole = total
    else:
        order, whole = order[w[order] >= how["min_p"]], 0
    if how["top_p"] < 1:
        wanted = int(np.ceil(np.float64(how["top_p"]) * np.float64(whole)))
        running = np.cumsum(u[order])
        enough = np.flatnonzero(running >= np.uint64(wanted))
        order = order[:enough[0] + 1] if len(enough) else order
    order = np.sort(order[w[order] >= how["min_p"]])
    running = np.cumsum(u[order])
    target = bits * int(running[-1]) >> 53
    return int(order[np.argmax(running > np.uint64(target))])


def reference(model, row, how):
    """(token, status, log-probability in float64)."""
    for r in (model, row):
        if np.isnan(r).any() or not np.isfinite(r.max()):
            return 0, 1, 0.0
    token = token_of(row, how)
    best = np.float64(model.max())
    total = np.exp(model.astype("f8") - best).sum()
    return token, 0, np.float64(model[token]) - best - np.log(total)


class Sampler:
    def __init__(self):
        self.module = Module("sample.cu")

    def prepare(self, model, logits, count, seen, how):
        """Tensors of one call; model and logits may be the same."""
        rows, chunks, blocks = model.shape[0], -(-count // 8192), -(-count // 256)
        scratch = lambda *shape, kind: torch.full(shape, -1, dtype=kind, device="cuda")
        set_words = seen.shape[1] if seen is not None else 0
        how = torch.from_numpy(how.view("u1").reshape(-1).copy()).cuda()
        bests, keys = scratch(rows, 2, chunks, kind=torch.int64), scratch(rows, blocks, kind=torch.int32)
        sums = scratch(rows, 2, blocks, kind=torch.int64)
        out = torch.full((rows * 12,), 0xEE, dtype=torch.uint8, device="cuda")
        tokens = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        common = [model, i64(model.stride(0)), logits, i64(logits.stride(0)), u32(count), seen,
                  u32(set_words), how]

        def run():
            self.module.launch("sample_best", (chunks, rows), 128, *common, bests, keys, u32(chunks),
                               u32(blocks))
            self.module.launch("sample_sums", (chunks, rows), 128, *common, bests, sums, u32(chunks),
                               u32(blocks))
            self.module.launch("sample_pick", (1, rows), 1024, *common, bests, keys, sums, u32(chunks),
                               u32(blocks), out, tokens)
        return run, out, tokens


def random_row(rng, count, kind):
    if kind == "peaked":
        row = rng.normal(0, 3, count)
        row[rng.integers(0, count, min(count, 30))] += rng.uniform(5, 15)
    elif kind == "flat":
        row = rng.normal(0, 0.5, count)
    elif kind == "ties":
        row = rng.integers(-3, 4, count) * 0.75
    elif kind == "masked":
        row = np.where(rng.random(count) < 0.99, -np.inf, rng.normal(0, 2, count))
        row[rng.integers(0, count)] = 0.5
    elif kind == "wide":
        row = rng.normal(0, 40, count)
    else:
        row = np.full(count, np.float64(f32(3.4e38)) if rng.random() < 0.5 else -3.4e38)
    return row.astype("f4")


def random_how(rng, rows, count):
    how = np.zeros(rows, ROW)
    how["seed"] = rng.integers(0, 2**63, rows, dtype="u8")
    how["choice"], how["position"] = rng.integers(0, 5, rows), rng.integers(0, 100000, rows)
    how["temperature"] = rng.choice([0, 0.05, 0.7, 1.0, 1.0, 3.0, 1e-30, 1e30], rows)
    ks = [0, 0, 0, 1, 2, 20, 50, max(count // 3, 1), max(count - 1, 1)]
    how["top_k"] = np.minimum(rng.choice(ks, rows), count - 1)
    how["top_p"] = rng.choice([1, 1, 0.9, 0.5, 0.01, 0.9999, 1e-6, 1 - 2.0**-24], rows)
    how["min_p"] = rng.choice([0, 0, 0.05, 0.9, 1.0], rows)
    how["penalty"] = rng.choice([1, 1, 1.3, 0.7], rows)
    how["set"] = np.where(how["penalty"] != 1, np.arange(rows), NO_SET)
    return how


def check_batch(sampler, report, rng, count, rows, stride, other):
    kinds = ["peaked", "flat", "ties", "masked", "wide", "extreme"]
    model = np.zeros((rows, stride), "f4")
    for r in range(rows):
        model[r, :count] = random_row(rng, count, kinds[rng.integers(len(kinds))])
    model[:, count:] = np.nan
    for r, bad in zip(range(1, rows, 9), [np.nan, np.inf, -np.inf]):
        model[r, rng.integers(0, count) if np.isnan(bad) or bad > 0 else slice(0, count)] = bad
    drawn = model.copy()
    if other:
        drawn[:, :count] += rng.normal(0, 1, (rows, count)).astype("f4")
        drawn[rows // 2, :count // 2] = -np.inf
    how = random_how(rng, rows, count)
    seen = (rng.random((rows, -(-count // 64) * 64)) < 0.1)
    seen[:, count:] = False
    words = np.packbits(seen, axis=1, bitorder="little").view("i4")
    on_device = torch.from_numpy(model).cuda()
    drawn_on_device = torch.from_numpy(drawn).cuda() if other else on_device
    run, out, tokens = sampler.prepare(on_device, drawn_on_device, count,
                                       torch.from_numpy(words).cuda(), how)
    run()
    got = out.cpu().numpy().view(OUT)
    alone = np.where(got["status"] == 0, got["token"], 2**31 - 1)
    report.check(f"tokens by themselves, {count}", np.array_equal(tokens.cpu().numpy(), alone))
    again = []
    for _ in range(2):
        run()
        again.append(out.cpu().numpy().view(OUT))
    report.check(f"the same again, {count}", all(np.array_equal(a.view("u1"), got.view("u1")) for a in again))
    wrong = 0
    for r in range(rows):
        row, penalty = drawn[r, :count].copy(), how["penalty"][r]
        if penalty != 1:
            at = seen[r, :count]
            with np.errstate(over="ignore"):
                row[at] = np.where(row[at] > 0, row[at] / penalty, row[at] * penalty)
        with np.errstate(invalid="ignore"):
            token, status, logprob = reference(model[r, :count], row, how[r])
        same = (got["token"][r], got["status"][r]) == (token, status)
        close = status == 1 or abs(got["logprob"][r] - logprob) <= 2e-6 * abs(logprob) + 2e-6 or \
            (np.isinf(logprob) and np.isinf(got["logprob"][r]))
        if not (same and close):
            wrong += 1
            if wrong <= 3:
                print(f"  {count}, row {r}: got {got[r]}, want {(token, status, logprob)}, {how[r]}")
        report.passed += 1
    report.check(f"tokens of {count} x {rows} (stride {stride}, other {other})", wrong == 0,
                 f"{wrong} rows differ")


def times(sampler):
    rng = np.random.default_rng(7)
    for rows in [1, 64, 256]:
        for name, kind, settings in [
                ("greedy", "peaked", {}),
                ("temperature", "peaked", {"temperature": 0.7}),
                ("top-k 20", "peaked", {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
                ("top-p 0.9", "peaked", {"temperature": 0.7, "top_p": 0.9}),
                ("top-p 0.9, flat", "flat", {"temperature": 0.7, "top_p": 0.9}),
                ("min-p 0.05", "peaked", {"temperature": 0.7, "min_p": 0.05}),
                ("top-k 20, penalty", "peaked", {"temperature": 0.7, "top_k": 20, "penalty": 1.2})]:
            count = 128256
            model = torch.from_numpy(
                np.stack([random_row(rng, count, kind) for _ in range(min(rows, 8))])).cuda()
            model = model.repeat(-(-rows // 8), 1)[:rows].contiguous()
            how = np.zeros(rows, ROW)
            how["top_p"], how["penalty"], how["set"], how["seed"] = 1, 1, NO_SET, np.arange(rows)
            seen = torch.zeros((rows, 4008), dtype=torch.int32, device="cuda")
            for field, value in settings.items():
                how[field] = value
            if "penalty" in settings:
                how["set"] = np.arange(rows)
            run, _, _ = sampler.prepare(model, model, count, seen, how)
            print(f"sample {rows} x {count}, {name}: {median_us(run, 20):.1f} us", flush=True)


def main():
    sampler, report = Sampler(), Report()
    seed = int.from_bytes(np.random.bytes(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    cases = [(1, 40), (5, 60), (255, 60), (256, 60), (257, 60), (1000, 200), (8192, 60), (8193, 60),
             (32000, 60), (128256, 96), (151669, 40), (262144, 24)]
    for count, rows in cases:
        for stride, other in [(count, False), (-(-count // 4) * 4, True)]:
            check_batch(sampler, report, rng, count, rows, stride, other)
    times(sampler)
    print(f"sampling: {report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
