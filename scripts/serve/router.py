#!/usr/bin/env python3
"""Puts `smg` (PyPI) in front of two servers and checks what several machines rely on.

    scripts/serve/router.py --smg PATH/TO/smg [--engine-host PROGRAM] [--plugins DIR] [--model FILE.gguf]

Turns of one conversation go to the server that has its beginning cached; and when a server is killed, every request
that had not begun to stream is answered by the other one.
"""
import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from served import MODEL, ROOT, Served


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def post(port, body):
    """Status, text before the connection ended, and whether any of it is of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                 b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    answer = b""
    try:
        while part := await reader.read(1 << 16):
            answer += part
    except OSError:
        pass
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head else 0, rest


def chat(words, turns, **more):
    messages = [{"role": "user", "content": words}]
    for i in range(turns):
        messages += [{"role": "assistant", "content": f"Answer {i}."}, {"role": "user", "content": f"And number {i}?"}]
    return {"model": MODEL.stem, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


async def stickiness(port):
    """Cached tokens of the last turns: most of the conversation, if it was sent to the same server."""
    topics = ["the rivers of Norway " * 6, "how clocks were built " * 6, "birds that winter here " * 6, "letters from the sea " * 6]
    stuck = 0
    for turns in range(4):
        for topic in topics:
            status, body = await post(port, chat(topic, turns))
            assert status == 200, body
            usage = json.loads(body[body.index(b"{"): body.rindex(b"}") + 1])["usage"]
            if turns:
                stuck += usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 2
    return stuck, 3 * len(topics)


async def kill(port, servers):
    """Kills the server that has more to do, while most of it has not begun; what comes of that?"""
    tasks = [asyncio.create_task(post(port, chat(f"{i} questions about {i * 7} " * 20, 0, stream=i % 2 == 0, max_tokens=300, ignore_eos=True)))
             for i in range(24)]
    for _ in range(300):
        await asyncio.sleep(0.1)
        loads = [(await asyncio.to_thread(server.get, "/v1/loads"))["loads"][0] for server in servers]
        victim = max(range(len(servers)), key=lambda i: loads[i]["num_waiting_reqs"])
        if loads[victim]["num_waiting_reqs"] >= 3:
            break
    servers[victim].process.send_signal(signal.SIGKILL)
    lost = cut = answered = 0
    for status, body in await asyncio.gather(*tasks):
        is_whole = status == 200 and (b"[DONE]" in body or b'"usage"' in body)
        if is_whole:
            answered += 1
        elif status == 200 and b"data: {" in body:
            cut += 1
        else:
            lost += 1
            print(f"lost: {status} {body[:200]}", file=sys.stderr)
    return answered, cut, lost, loads[victim]


def wait_for_both(port):
    """The router asks servers when they are told to it; until both have answered it sends all to one."""
    for _ in range(300):
        try:
            workers = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5))["workers"]
            if sum(worker["is_healthy"] for worker in workers) == 2:
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    sys.exit("the router does not find both servers")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smg", required=True)
    parser.add_argument("--engine-host", default=None)
    parser.add_argument("--plugins", default=ROOT / "plugins")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args()
    # Few at a time, so that others wait.
    servers = [Served(given.engine_host, model=given.model, plugins=given.plugins, max_batch=4) for _ in range(2)]
    port = free_port()
    router = subprocess.Popen([given.smg, "launch", "--worker-urls", *(s.base for s in servers), "--policy", "cache_aware",
                               "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_both(port)
        stuck, of = asyncio.run(stickiness(port))
        print(f"{stuck} of {of} later turns found their conversation cached")
        answered, cut, lost, load = asyncio.run(kill(port, servers))
        running, waiting = load["num_running_reqs"], load["num_waiting_reqs"]
        print(f"a server killed with {running} requests that ran and {waiting} that waited, of 24 in all: {answered} answered, "
              f"{cut} cut in their stream, {lost} lost")
        if waiting == 0:
            sys.exit("nothing waited at the server that was killed, so nothing was shown")
        sys.exit(0 if stuck >= of * 3 // 4 and lost == 0 and cut <= running else 1)
    finally:
        router.terminate()
        router.wait()
        for server in servers:
            if server.process.poll() is None:
                server.stop()


main()
