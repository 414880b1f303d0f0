#!/usr/bin/env python3
"""Sends `engine-host serve` what no client should send, by hand, over plain sockets.

    scripts/serve/attack.py [--engine-host PROGRAM] [--plugins DIR] [--model FILE.gguf]

Every answer must have the status that is written beside it here and, where it is an error, OpenAI's shape on one
line; afterwards the server must answer as before and hold no more than before.
"""
import argparse
import json
import socket
import sys
import time

from served import MODEL, ROOT, Served

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]
wrong = []


def check(what, ok, seen=""):
    if not ok:
        wrong.append(what)
        print(f"WRONG {what}: {str(seen)[:400]}", file=sys.stderr)


def connect(server):
    sock = socket.create_connection((server.host, int(server.port)), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read_all(sock):
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except OSError as e:
        return data, e
    return data, None


def parse(data):
    """Status, headers and body of the first answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin1").split("\r\n")
    status = int(lines[0].split(" ")[1]) if data else 0
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            n = int(size, 16)
            whole, body = whole + rest[:n], rest[n + 2:] if n else b""
        body = whole
    return status, headers, body


def raw(server, data, patience=None):
    sock = connect(server)
    if patience:
        sock.settimeout(patience)
    try:
        sock.sendall(data)
    except OSError:
        pass  # Refused before it was all sent.
    answer, _ = read_all(sock)
    sock.close()
    return parse(answer)


def post(server, path, body, kind="application/json", more=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    return raw(server, head.encode() + data)


def is_error(body):
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return {"message", "type", "param", "code"} <= error.keys() and error["message"] and "\n" not in error["message"]


def expect(what, answer, status, part=""):
    code, headers, body = answer
    statuses = status if isinstance(status, tuple) else (status,)
    check(f"{what} (status {code})", code in statuses, body)
    if code >= 400:
        check(f"{what}: no error of OpenAI's shape", is_error(body), body)
        check(f"{what}: does not say {part!r}", part in body.decode("utf8", "replace"), body)
    return answer


def bodies(server):
    def complete(what, fields, status, part="", base=None):
        expect(f"completion with {what}", post(server, COMPLETE, {"prompt": "Hi", "max_tokens": 2} | fields), status, part)

    types = [True, 3, -1, 1.5, "x", [], ["x"], [[]], {}, {"a": 1}, [None], 1e300]
    fields = """model n best_of use_beam_search response_format stream stream_options stop include_stop_str_in_output
        skip_special_tokens min_tokens ignore_eos stop_token_ids timeout overrides cache_salt temperature top_p min_p top_k
        repetition_penalty presence_penalty frequency_penalty logit_bias seed prompt add_special_tokens echo logprobs
        max_tokens suffix user metadata""".split()
    for field in fields:
        for value in types:
            complete(f"{field} = {value}", {field: value}, (200, 400, 404))
    chat_fields = """messages tools tool_choice add_generation_prompt chat_template_kwargs reasoning_effort chat_template
        continue_final_message max_completion_tokens max_tokens logprobs top_logprobs modalities audio prediction verbosity
        parallel_tool_calls functions function_call web_search_options include_reasoning echo""".split()
    for path in (CHAT, CHAT + "/render"):
        for field in chat_fields:
            for value in types:
                expect(f"{path} with {field} = {value}", post(server, path, {"messages": ASK, "max_tokens": 2} | {field: value}), (200, 400))
    for messages in [[1], [None], [[]], [{}], [{"role": "user"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}],
                     [{"role": "user", "content": [3]}], [{"role": "user", "content": [{"type": "text"}]}],
                     [{"role": "user", "content": [{"type": "text", "text": 3}]}], [{"role": "assistant", "tool_calls": 3}],
                     [{"role": "assistant", "tool_calls": [3]}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
                     [{"role": "user", "content": {"a": 1}}]]:
        expect(f"messages {messages}", post(server, CHAT, {"messages": messages, "max_tokens": 1}), 400, "messages")
    for content in ["", "\0", "a\0b", "\ufeff", "\u202e", "\U0010ffff", "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% raw %}"]:
        expect(f"content {content!r}", post(server, CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}), 200)
    for n, status in [(0, 400), (1000, 400), (65, 400), (64, 200)]:
        complete(f"n = {n}", {"n": n, "max_tokens": 1}, status, "n must be")
    complete("max_tokens = 0", {"max_tokens": 0}, 200)
    complete("1,000 stops", {"stop": ["x"] * 1000}, 400, "stop must be at most")
    complete("a stop of 1 MB", {"stop": "x" * (1 << 20)}, 400, "stop must be at most")
    complete("1,000 stop ids", {"stop_token_ids": list(range(100, 1100))}, 200)
    complete("a bias for everything", {"logit_bias": {str(i): 1 for i in range(49152)}}, (200, 400))
    complete("a bias out of the vocabulary", {"logit_bias": {"49152": 1}}, 400, "49152")
    complete("a bias for -1", {"logit_bias": {"-1": 1}}, 400, "-1")
    complete("a bias for 007", {"logit_bias": {"007": 1}}, (200, 400))
    for ids in ([49152], [-1], [2**31], [2**32], [2**63], [2**64], [1.5], [True], [None], [1, "a"], ["a", 1]):
        complete(f"prompt {ids}", {"prompt": ids}, 400, "prompt")
    complete("a prompt of 20,000 ids", {"prompt": [1000] * 20000}, 400, "context")
    complete("a prompt of 3 MB", {"prompt": "word " * 600000}, 400, "context")
    complete("2,000 prompts", {"prompt": ["a"] * 2000}, 400, "answers")
    complete("a timeout of nothing", {"timeout": 1e-9}, (200, 504))
    complete("a timeout of an age", {"timeout": 1e18, "max_tokens": 1}, 200)
    complete("a field of 1 MB", {"x" * (1 << 20): 1}, 400, "unknown field")
    complete("a salt of 1 MB", {"cache_salt": "x" * (1 << 20)}, (200, 400))
    complete("overrides of nobody", {"overrides": {"nobody": {"a": 1}}}, 400, "nobody")
    nested = b"[" * 100000 + b"]" * 100000
    deep = b'{"a":' * 120 + b"1" + b"}" * 120
    for what, body, status in [
        ("nothing", b"", 400), ("a list", b"[]", 400), ("a word", b"null", 400), ("half of it", b'{"prompt": "x"', 400),
        ("two of it", b'{"prompt": "x"} {"prompt": "x"}', 400), ("a BOM", b'\xef\xbb\xbf{"prompt": "x"}', 400), ("no UTF-8", b'{"prompt": "\xff"}', 400),
        ("a lone surrogate", b'{"prompt": "\\ud800"}', 400), ("a surrogate the wrong way", b'{"prompt": "\\udc00\\ud800"}', 400),
        ("a bare NUL", b'{"prompt": "a\0b"}', 400), ("an escaped NUL", b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
        ("NaN", b'{"prompt": "x", "temperature": NaN}', 400), ("Infinity", b'{"prompt": "x", "temperature": Infinity}', 400),
        ("1e400", b'{"prompt": "x", "temperature": 1e400}', 400), ("nested lists", nested, 400),
        ("a deep prompt", b'{"prompt": ' + nested + b"}", 400), ("deep metadata", b'{"prompt": "x", "max_tokens": 1, "metadata": ' + deep + b"}", 200),
        ("a key twice", b'{"prompt": "x", "max_tokens": 1, "prompt": "y"}', 200), ("the limit and more", b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413),
        ("1.0 tokens", b'{"prompt": "x", "max_tokens": 1.0}', 200), ("-0 tokens", b'{"prompt": "x", "max_tokens": -0}', 200),
    ]:
        expect(f"a body of {what}", post(server, COMPLETE, body), status)
    for path in ("/tokenize", "/detokenize"):
        for value in types:
            for key in ("prompt", "tokens", "messages", "model", "add_special_tokens", "return_token_strs"):
                expect(f"{path} {key} = {value}", post(server, path, {key: value}), (200, 400))


def protocol(server):
    def get(path, method="GET", version="1.1", more=""):
        return raw(server, f"{method} {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n{more}\r\n".encode())

    good = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for kind in ("", "text/plain", "application/xml", "multipart/form-data", "application/jsonx", "application/x-www-form-urlencoded"):
        expect(f"type {kind!r}", post(server, COMPLETE, good, kind), 415, "application/json")
    expect("a type with a charset", post(server, COMPLETE, good, "Application/JSON; charset=utf-8"), 200)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        expect(f"{method} on completions", get(COMPLETE, method), 405, method)
    expect("TRACE", get("/health", "TRACE"), 405)
    expect("a method that is none", get("/health", "BREW"), 405)
    for path in ("/health", "/v1/models", "/metrics"):
        code, headers, body = get(path, "HEAD")
        check(f"HEAD {path}", code == 200 and body == b"", (code, body))
    for path in ("/", "/v1", "/v1/", "/v1/models/", "/v1//models", "/../etc/passwd", "/v1/models/%2e%2e", "/%00", "/v1/models/a%ff", "/x" * 2000, "/?a=b"):
        expect(f"GET {path[:40]}", get(path), (400, 404))
    expect("a query", get("/v1/models?x=" + "y" * 3000), 200)
    code, headers, _ = get("/v1/models", version="1.0")
    check("HTTP/1.0", code == 200, code)
    stream = json.dumps({"prompt": "Hi", "max_tokens": 3, "stream": True, "ignore_eos": True}).encode()
    old = raw(server, b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(stream), stream))
    check("a stream over HTTP/1.0", old[0] == 200 and b"[DONE]" in old[2] and "transfer-encoding" not in old[1], old)
    # Several requests at once on one connection: answered in their order.
    sock = connect(server)
    one = plain + b"Content-Length: %d\r\n\r\n%s" % (len(good), good)
    sock.sendall(one * 3 + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    data, _ = read_all(sock)
    check("pipelining", data.count(b"HTTP/1.1 200") == 4 and data.rstrip().endswith(b'{"status":"ok"}'), data[-300:])
    # Expect: 100-continue, answered before the body comes.
    sock = connect(server)
    sock.sendall(plain + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(good))
    first = sock.recv(100)
    check("100-continue", first.startswith(b"HTTP/1.1 100"), first)
    sock.sendall(good)
    check("after 100-continue", b"HTTP/1.1 200" in read_all(sock)[0])
    # A body in chunks, and chunks that are none.
    chunked = plain + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    check("chunks", raw(server, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(good), good))[0] == 200)
    expect("broken chunks", raw(server, chunked + b"zz\r\n" + good), 400)
    expect("chunks above the limit", raw(server, chunked + b"500000\r\n" + b"x" * 0x500000 + b"\r\n0\r\n\r\n"), 413)
    expect("a length above the limit", raw(server, plain + b"Content-Length: 99999999999\r\n\r\n{"), 413)
    # What cannot be read is refused before there is a body; another version's beginning is just cut.
    for what, head, statuses in [
        ("no HTTP", b"hello\r\n\r\n", (400,)), ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500, (400,)),
        ("two lengths", plain + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", (400,)),
        ("a length that is none", plain + b"Content-Length: -1\r\n\r\n{}", (400,)),
        ("length and chunks", plain + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
        ("a head of 1 MB", b"GET /health HTTP/1.1\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n", (431,)),
        ("1,000 headers", b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000 + b"\r\n", (431,)),
        ("a path of 1 MB", b"GET /" + b"y" * (1 << 20) + b" HTTP/1.1\r\n\r\n", (414, 431)),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (0,)),
    ]:
        code, _, _ = raw(server, head)
        check(f"{what} (status {code})", code in statuses)
    for more in ("Origin: http://evil", "X-Forwarded-For: 1.2.3.4", "Forwarded: for=1.2.3.4"):
        expect(f"admin with {more}", get("/admin/plugins", more=more + "\r\n"), 403)
    code, headers, _ = get("/v1/models", more="Origin: http://evil\r\n")
    check("no page of another origin may read", not any(name.startswith("access-control") for name in headers), headers)


def streams(server):
    """Text in streams against the whole, where characters, stops and several answers are cut over tokens."""
    emoji = "Repeat: 😀 你好 ñ 🇳🇴 👩‍👩‍👧 "
    for body in [
        {"prompt": emoji, "max_tokens": 24, "temperature": 0},
        {"prompt": emoji, "max_tokens": 24, "n": 3, "temperature": 1.5, "seed": 3},
        {"prompt": [emoji, "Once"], "max_tokens": 12, "n": 2, "seed": 4, "echo": True, "logprobs": 2},
        {"prompt": "Count: 1, 2, 3,", "max_tokens": 32, "stop": [", 7, 8"], "temperature": 0},
        {"prompt": "Count: 1, 2, 3,", "max_tokens": 32, "stop": [", 7, 8"], "temperature": 0, "include_stop_str_in_output": True},
    ]:
        body |= {"ignore_eos": True}
        whole = json.loads(expect(f"whole {body}", post(server, COMPLETE, body), 200)[2])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, _, text = expect(f"stream {body}", post(server, COMPLETE, body | options), 200)
        lines = [line[6:] for line in text.decode().split("\n") if line.startswith("data: ")]
        check(f"[DONE] ends {body}", lines and lines.pop() == "[DONE]", text[-100:])
        events = [json.loads(line) for line in lines]
        check(f"usage of {body}", events[-1]["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {"prompt_tokens_details": 0}
              and events[-1]["choices"] == [] and all(e["usage"] is None for e in events[:-1]), events[-1])
        for choice in whole["choices"]:
            mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
            check(f"text of {body}", "".join(c["text"] for c in mine) == choice["text"], (mine, choice["text"]))
            check(f"no torn character in {body}", "\ufffd" not in choice["text"] or "seed" in body, choice["text"])
            check(f"one end of {body}", [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]], mine)
            if choice["logprobs"]:
                tokens = [t for c in mine if c["logprobs"] for t in c["logprobs"]["tokens"]]
                offsets = [t for c in mine if c["logprobs"] for t in c["logprobs"]["text_offset"]]
                check(f"tokens of {body}", tokens == choice["logprobs"]["tokens"] and offsets == choice["logprobs"]["text_offset"], tokens)
    stop = json.loads(post(server, COMPLETE, {"prompt": "Count: 1, 2, 3,", "max_tokens": 32, "stop": [", 7, 8"], "temperature": 0})[2])
    check("a stop over tokens", stop["choices"][0]["finish_reason"] == "stop" and "7" not in stop["choices"][0]["text"], stop)


def crowds(server):
    """Many who come and go, and some who dawdle: others are answered meanwhile."""
    dawdlers = []
    for i in range(200):
        sock = connect(server)
        sock.sendall([b"POST ", b"GET /health HTTP/1.1\r\nHo", b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{", b""][i % 4])
        dawdlers.append(sock)
    body = json.dumps({"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    for i in range(300):
        sock = connect(server)
        sock.sendall(request)
        if i % 3 == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # Closed by a reset.
        if i % 3 == 1:
            sock.recv(10)
        sock.close()
    began = time.monotonic()
    expect("somebody else meanwhile", post(server, COMPLETE, {"prompt": "Hi", "max_tokens": 2}), 200)
    check("somebody else waits", time.monotonic() - began < 10, time.monotonic() - began)
    return dawdlers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-host", default=None)
    parser.add_argument("--plugins", default=ROOT / "plugins")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args()
    server = Served(given.engine_host, ["--read-timeout", "5"], model=given.model, plugins=given.plugins)
    expect("the first request", post(server, COMPLETE, {"prompt": "Hi", "max_tokens": 2}), 200)
    before = server.held()
    for part in (bodies, protocol, streams):
        part(server)
        print(f"{part.__name__}: {len(wrong)} wrong so far", file=sys.stderr)
    dawdlers = crowds(server)
    time.sleep(7)
    for i, sock in enumerate(dawdlers):
        sock.settimeout(1)
        data, error = read_all(sock)
        check(f"dawdler {i % 4} is still connected", error is None or isinstance(error, ConnectionResetError), error)
        sock.close()
    for _ in range(50):
        after = server.held()
        if all(after[key] <= before[key] for key in ("requests", "tokens", "descriptors", "threads")):
            break
        time.sleep(0.1)
    else:
        check("not back to the start", False, (before, after))
    expect("the last request", post(server, COMPLETE, {"prompt": "Hi", "max_tokens": 2}), 200)
    check("the end", server.stop() == 0)
    print(f"{len(wrong)} wrong; held before {before}, after {after}")
    sys.exit(1 if wrong else 0)


main()
