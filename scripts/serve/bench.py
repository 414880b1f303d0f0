#!/usr/bin/env python3
"""Compares `engine-host serve` with the server of llama-cpp-python on the same file, in turns, and prints a table.

    LLAMA_PYTHON=/path/to/venv/bin/python scripts/serve/bench.py [--clients 1 8 32] [--seconds 20] [--rounds 3]
        [--threads 2] [--engine-host PROGRAM] [--plugins DIR] [--model FILE.gguf] [--report docs/performance.md]

LLAMA_PYTHON is a Python with llama-cpp-python[server]; `python -m llama_cpp.server` runs beside nothing else, told not
to cut a stream when another request comes. Each round starts one server after the other, and asks it in a loop from
so many clients at a time: prompts of 30 to 60 words that differ, 48 tokens, greedy, streamed. Throughput is generated
tokens by wall time, the time to the first token is the median over requests. engine-host runs with int8 activations,
as llama.cpp does. --report replaces what is between the two bench-serve comments of that file.
"""
import argparse
import asyncio
import datetime
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

from served import MODEL, ROOT, Served

WORDS = "the sea a light old stone river of and in winter bird city green machine letter under song".split()
TOKENS = 48


class LlamaServer:
    """`python -m llama_cpp.server`."""

    def __init__(self, given):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host, self.port = "127.0.0.1", free.getsockname()[1]
        command = [given.llama_python, "-m", "llama_cpp.server", "--model", str(given.model), "--port", str(self.port),
                   "--n_threads", str(given.threads), "--n_threads_batch", str(given.threads), "--n_ctx", "4096",
                   "--verbose", "False", "--interrupt_requests", "False"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://{self.host}:{self.port}/v1/models", timeout=5).read()
                return
            except OSError:
                time.sleep(0.2)
        sys.exit("llama_cpp.server does not answer")

    def stop(self):
        self.process.terminate()
        self.process.wait()


async def ask(server, rng):
    """Seconds to the first token, and the number of tokens."""
    body = {"prompt": " ".join(rng.choices(WORDS, k=rng.randint(30, 60))), "max_tokens": TOKENS,
            "temperature": 0, "stream": True, "logit_bias": {}}
    data = json.dumps(body).encode()
    started = time.monotonic()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
    first, tokens = None, 0
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["text"]:
                first = first or time.monotonic() - started
                tokens += 1
    writer.close()
    if first is None:
        raise RuntimeError("an answer without a token")
    return first, tokens


async def measure(server, clients, seconds):
    firsts, tokens = [], 0

    async def client(number):
        nonlocal tokens
        rng = random.Random(number)
        while time.monotonic() < end:
            first, count = await ask(server, rng)
            firsts.append(first)
            tokens += count

    await ask(server, random.Random(-1))
    started = time.monotonic()
    end = started + seconds
    await asyncio.gather(*(client(n) for n in range(clients)))
    return {"rate": tokens / (time.monotonic() - started), "first": statistics.median(firsts)}


def table(given, results, loads):
    version = subprocess.run([given.llama_python, "-c", "import llama_cpp; print(llama_cpp.__version__)"],
                             capture_output=True, text=True).stdout.strip()
    date = datetime.date.today().strftime("%d %B %Y").lstrip("0")
    lines = [
        f"{pathlib.Path(given.model).name}, {given.threads} threads; {date}; load average at the start of a round "
        f"{min(loads):.1f} to {max(loads):.1f}; medians of {given.rounds} rounds, the servers in turns.",
        "",
        f"| clients | engine-host, tokens/s | llama-cpp-python {version}, tokens/s | ratio | first token, ms | "
        "llama-cpp-python, ms |",
        "|---|---|---|---|---|---|",
    ]
    for clients in given.clients:
        of = lambda name, key: statistics.median(r[key] for r in results[name, clients])
        ours, theirs = of("engine-host", "rate"), of("llama.cpp", "rate")
        lines.append(f"| {clients} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} | "
                     f"{1000 * of('engine-host', 'first'):,.0f} | {1000 * of('llama.cpp', 'first'):,.0f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-host", default=None)
    parser.add_argument("--plugins", default=ROOT / "plugins")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=pathlib.Path)
    given = parser.parse_args()
    given.llama_python = os.environ.get("LLAMA_PYTHON") or parser.error("LLAMA_PYTHON is not set")
    results, loads = {}, []
    for number in range(given.rounds):
        loads.append(os.getloadavg()[0])
        for name in ("engine-host", "llama.cpp"):
            print(f"round {number + 1} of {given.rounds}: {name}", file=sys.stderr)
            if name == "engine-host":
                server = Served(given.engine_host, model=given.model, plugins=given.plugins, activations="int8",
                                threads=given.threads)
            else:
                server = LlamaServer(given)
            for clients in given.clients:
                figures = asyncio.run(measure(server, clients, given.seconds))
                print(f"  {clients} clients: {figures}", file=sys.stderr)
                results.setdefault((name, clients), []).append(figures)
            server.stop()
    text = table(given, results, loads)
    print(text)
    if given.report:
        page = given.report.read_text()
        begin, end = "<!-- bench-serve -->\n", "\n<!-- /bench-serve -->"
        before, rest = page.split(begin)
        given.report.write_text(before + begin + text + end + rest.split(end)[1])


main()
