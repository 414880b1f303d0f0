#!/usr/bin/env python3
"""Puts `engine-host serve` under load and checks that nothing is wrong with the answers and nothing is left.

    scripts/serve/load.py [--requests 2000] [--concurrent 64] [--leave 0.1] [--rate 40] [--pages 4096]
        [--minutes M] [--engine-host PROGRAM] [--plugins DIR] [--model FILE.gguf] [--set KEY JSON]...

Requests arrive at random (Poisson, `--rate` a second, at most `--concurrent` at a time), have mixed lengths, half
of them stream, and a share of them leaves before the end. Every greedy answer must be the one that the same
request gets alone. At the end requests, cache, descriptors, threads and memory must be back where they were after the
first tenth, when all that is kept for later has been made. With `--minutes` it goes on for so long; with a small
`--pages` requests give way to each other all the time. `--set device '"cuda:0"' --set batch_invariant true` is for a GPU.
"""
import argparse
import asyncio
import json
import random
import sys
import time

from served import MODEL, ROOT, Served

# What an allocator may keep more at one time than at another.
SLACK_MB = 48
WORDS = "the sea a light old stone river of and in winter bird city green machine letter under song".split()


class Client:
    """One request on one connection; counts what goes wrong."""

    def __init__(self, server):
        self.server = server

    async def ask(self, body, leave_after=None):
        """The text of an answer; None when it left. Raises for anything but an answer."""
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        try:
            data = json.dumps(body).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
            )
            await writer.drain()
            if leave_after is not None:
                await asyncio.sleep(leave_after)
                return None
            answer = await reader.read()
        finally:
            writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            raise RuntimeError(f"{status}: {rest[:200]}")
        if not body.get("stream"):
            return json.loads(rest)["choices"][0]["text"]
        lines = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"[DONE]":
            raise RuntimeError(f"the stream was cut: {rest[-200:]}")
        events = [json.loads(line) for line in lines]
        if errors := [event["error"] for event in events if "error" in event]:
            raise RuntimeError(str(errors[0]))
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def kinds(seed, longest):
    """Thirty prompts of which many begin alike, with lengths of answers."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(WORDS, k=n)) for n in (0, 8, 40, longest // 2)]
    for _ in range(30):
        prompt = (rng.choice(beginnings) + " " + " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))).strip()
        yield {"prompt": prompt, "max_tokens": rng.choice([1, 4, 16, 32, 64]), "temperature": 0}


async def run(given, server):
    client, rng = Client(server), random.Random(1)
    asked = list(kinds(2, given.longest))
    solo = [await client.ask(body) for body in asked]
    places, tasks = asyncio.Semaphore(given.concurrent), set()
    counts = {"answered": 0, "left": 0, "sampled": 0, "wrong": 0, "errors": 0}
    started = time.monotonic()
    sent = 0

    async def one():
        kind = rng.randrange(len(asked))
        body = dict(asked[kind], stream=rng.random() < 0.5)
        leaves = rng.random() < given.leave
        is_sampled = rng.random() < 0.2
        if is_sampled:
            body |= {"temperature": 1.0, "seed": rng.randrange(1000), "top_p": 0.9, "n": 1}
        try:
            text = await client.ask(body, rng.random() * 0.5 if leaves else None)
            if text is None:
                counts["left"] += 1
            elif is_sampled:
                counts["sampled"] += 1
            else:
                counts["answered"] += 1
                if text != solo[kind]:
                    counts["wrong"] += 1
                    print(f"differs: {body}\n  alone {solo[kind]!r}\n  now   {text!r}", file=sys.stderr)
        except Exception as e:
            counts["errors"] += 1
            print(f"{body}: {e!r}", file=sys.stderr)
        finally:
            places.release()

    async def report():
        while True:
            await asyncio.sleep(20)
            held = await asyncio.to_thread(server.held)
            print(f"{sent} sent, {len(tasks)} open, {time.monotonic() - started:.0f} s, {held}", file=sys.stderr, flush=True)

    async def storm(goes_on):
        nonlocal sent
        while goes_on():
            await asyncio.sleep(rng.expovariate(given.rate))
            await places.acquire()
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.5)

    def passed():
        return (time.monotonic() - started) / (given.minutes * 60) if given.minutes else sent / given.requests

    reporting = asyncio.create_task(report())
    await storm(lambda: passed() < 0.1)
    before = server.held()
    await storm(lambda: passed() < 1)
    reporting.cancel()
    seconds = time.monotonic() - started
    for _ in range(50):
        after = server.held()
        more = [key for key in before if after[key] > before[key] + (SLACK_MB if key == "memory_mb" else 0)]
        if not more:
            break
        await asyncio.sleep(0.3)
    preemptions = server.get("/server_info").get("preemptions")
    print(json.dumps({"requests": sent, "seconds": round(seconds, 1), **counts, "preemptions": preemptions,
                      "before": before, "after": after}))
    failed = counts["wrong"] or counts["errors"] or more
    if more:
        print(f"not back to the start: {', '.join(more)}", file=sys.stderr)
    return not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-host", default=None)
    parser.add_argument("--plugins", default=ROOT / "plugins")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=40)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--set", nargs=2, metavar=("KEY", "JSON"), action="append", default=[])
    given = parser.parse_args()
    lines = {key: json.loads(value) for key, value in given.set}
    server = Served(given.engine_host, model=given.model, plugins=given.plugins, pages=given.pages, **lines)
    ok = asyncio.run(run(given, server))
    code = server.stop()
    if code != 0:
        print(f"the server ended with {code}", file=sys.stderr)
    sys.exit(0 if ok and code == 0 else 1)


main()
