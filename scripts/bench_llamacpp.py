#!/usr/bin/env python3
"""What `engine-host bench model` measures, for llama.cpp through llama-cpp-python's low-level API.

    python3 bench_llamacpp.py MODEL.gguf THREADS [FIGURE ...]

Figures are prefill, b1, b8, b32 and b1_at_4096; all without any. Prints one JSON object with the keys of
`engine-host bench model --json`, one timed run of each figure after one that does not count. Threads are kept
between graphs, as llama-bench does; every decode step takes the likeliest token of every sequence and feeds it
back. Both ways to store the caches of a batch are tried, and the faster one counts.
"""
import ctypes
import json
import os
import resource
import sys
import time

import llama_cpp as L
import numpy as np

PREFILL = 512
# Sequences, tokens of each prompt, steps.
DECODE = {"b1": (1, 64, 128), "b8": (8, 64, 64), "b32": (32, 64, 32), "b1_at_4096": (1, 4096, 32)}


def token_ids(count, seed):
    state, ids = (seed * 2654435761 + 12345) & 0xFFFFFFFF, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        ids.append(17 + (state >> 8) % 49000)
    return ids


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Bench:
    def __init__(self, path, threads):
        self.threads = threads
        start = time.perf_counter()
        params = L.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = L.llama_model_load_from_file(path.encode(), params)
        assert self.model, path
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.batch = L.llama_batch_init(8192, 0, 1)
        self.pool = self.kept_threads()

    def kept_threads(self):
        """A thread pool that outlives a graph; the Python package has no binding for it."""
        folder = os.path.join(os.path.dirname(L.__file__), "lib")
        base = ctypes.CDLL(os.path.join(folder, "libggml-base.so.0"))
        cpu = ctypes.CDLL(os.path.join(folder, "libggml-cpu.so.0"))
        self.attach = ctypes.CDLL(os.path.join(folder, "libllama.so.0")).llama_attach_threadpool
        self.attach.argtypes, self.attach.restype = [ctypes.c_void_p] * 3, None
        params = ctypes.create_string_buffer(4096)
        base.ggml_threadpool_params_init(params, self.threads)
        cpu.ggml_threadpool_new.restype = ctypes.c_void_p
        return cpu.ggml_threadpool_new(params)

    def context(self, tokens, sequences, unified):
        params = L.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens, 512, 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = unified
        context = L.llama_init_from_model(self.model, params)
        assert context
        self.attach(context, self.pool, self.pool)
        return context

    def decode(self, context, rows):
        """Runs (token, position, sequence, wants logits) rows; the best token of each that wants."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, logits
            b.seq_id[i][0] = sequence
        assert L.llama_decode(context, b) == 0
        row = lambda i: np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), shape=(self.vocab,))
        return [int(row(i).argmax()) for i, r in enumerate(rows) if r[3]]

    def prompt(self, context, ids, sequence):
        """Feeds a prompt in batches of 512; the best next token."""
        best = []
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            last = len(ids) - 1
            best = self.decode(context, [(t, start + i, sequence, start + i == last) for i, t in enumerate(part)])
        return best[0]

    def prefill_rate(self):
        context = self.context(1024, 1, False)
        for seed in (1, 2):
            L.llama_memory_clear(L.llama_get_memory(context), False)
            start = time.perf_counter()
            self.prompt(context, token_ids(PREFILL, seed), 0)
            seconds = time.perf_counter() - start
        L.llama_free(context)
        return PREFILL / seconds

    def decode_rate(self, sequences, length, steps, unified):
        context = self.context(sequences * (-(-(length + steps) // 256) * 256), sequences, unified)
        for run in range(2):
            L.llama_memory_clear(L.llama_get_memory(context), False)
            prompts = [token_ids(length, 100 * run + s) for s in range(sequences)]
            best = [self.prompt(context, ids, s) for s, ids in enumerate(prompts)]
            start = time.perf_counter()
            for k in range(steps):
                best = self.decode(context, [(t, length + k, s, True) for s, t in enumerate(best)])
            seconds = time.perf_counter() - start
        L.llama_free(context)
        return sequences * steps / seconds


def main(path, threads, figures):
    quiet = L.llama_log_callback(lambda level, text, data: None)
    L.llama_log_set(quiet, ctypes.c_void_p(0))
    L.llama_backend_init()
    bench = Bench(path, threads)
    wanted = lambda figure: not figures or figure in figures
    prefill, after_prefill = bench.prefill_rate() if wanted("prefill") else None, peak_mb()
    ways = lambda shape: (False,) if shape[0] == 1 else (False, True)
    decode = {key: max(bench.decode_rate(*s, unified) for unified in ways(s)) for key, s in DECODE.items() if wanted(key)}
    print(json.dumps({
        "version": f"llama-cpp-python {L.__version__}",
        "load_ms": {"median": bench.load_ms},
        "prefill_512": {"median": prefill},
        "decode": {key: {"median": rate} for key, rate in decode.items()},
        "memory_mb": {"after_prefill": after_prefill, "peak": peak_mb()},
    }))


main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
