#!/usr/bin/env python3
"""Calls `engine-host serve` through the `openai` package as programs do, and checks every answer.

    scripts/serve/clients            makes an environment with the package and runs this

    openai_client.py [--engine-host PROGRAM] [--plugins DIR] [--model FILE.gguf]
"""
import argparse
import concurrent.futures
import json
import sys

import openai

from served import MODEL, ROOT, Served

FRANCE = "The capital of France is"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
calls = 0


def counted(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        return function(*args, **kwargs)

    return call


def refused(kind, part, function, *args, **kwargs):
    """The call must fail with this class of error, whose message holds `part`."""
    try:
        function(*args, **kwargs)
    except kind as e:
        assert part in str(e), f"{part!r} is not in {e}"
        return e
    raise AssertionError(f"not refused: {kwargs}")


def completions(client):
    complete = counted(client.completions.create)
    greedy = dict(model=client.name, prompt=FRANCE, temperature=0, max_tokens=8)
    plain = complete(**greedy)
    text = plain.choices[0].text
    assert "Paris" in text and plain.object == "text_completion" and plain.model == client.name
    assert plain.choices[0].finish_reason == "length" and plain.usage.completion_tokens == 8
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + 8
    assert complete(**greedy).choices[0].text == text
    chunks = list(complete(**greedy, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == text and chunks[-1].choices[0].finish_reason == "length"
    chunks = list(complete(**greedy, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert all(c.usage is None for c in chunks[:-1])
    # Beginnings that are cached are told.
    long = "A long story about a river and a city by the sea. " * 8
    complete(model=client.name, prompt=long, max_tokens=1)
    again = complete(model=client.name, prompt=long, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    # Prompts of all kinds.
    ids = counted(client.post)("../tokenize", body={"prompt": FRANCE}, cast_to=object)["tokens"]
    assert complete(**greedy | {"prompt": ids}).choices[0].text == text
    both = complete(**greedy | {"prompt": [FRANCE, "2 + 2 ="]})
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == text
    both = complete(**greedy | {"prompt": [ids, ids]})
    assert both.choices[0].text == both.choices[1].text == text
    # Ends.
    stop = complete(**greedy, stop=" Paris")
    assert stop.choices[0].text == "" and stop.choices[0].finish_reason == "stop"
    stop = complete(**greedy, stop=["nothing", "ris"])
    assert stop.choices[0].text == text[: text.index("ris")]
    chunks = list(complete(**greedy, stop=["is."], stream=True))
    streamed = "".join(c.choices[0].text for c in chunks)
    assert streamed == text.split("is.")[0], streamed
    paris = counted(client.post)("../tokenize", body={"prompt": " Paris"}, cast_to=object)["tokens"]
    stop = complete(**greedy, extra_body={"stop_token_ids": paris})
    assert stop.choices[0].text == "" and stop.usage.completion_tokens == 1
    stop = complete(**greedy, extra_body={"stop_token_ids": paris, "min_tokens": 3})
    assert stop.usage.completion_tokens >= 3
    # Settings of the sampler.
    assert " Paris" not in complete(**greedy, logit_bias={paris[0]: -100}).choices[0].text
    assert complete(**greedy, logit_bias={paris[0]: 100}).choices[0].text == " Paris" * 8
    hot = greedy | dict(temperature=1.3, max_tokens=24)
    assert complete(**hot, seed=5).choices[0].text == complete(**hot, seed=5).choices[0].text
    assert complete(**hot, seed=5).choices[0].text != complete(**hot, seed=6).choices[0].text
    assert complete(**hot).choices[0].text != complete(**hot).choices[0].text, "without a seed it is random"
    several = complete(**hot, n=3, seed=5)
    assert len({c.text for c in several.choices}) == 3
    repeats = greedy | dict(prompt="la la la la la la", max_tokens=24)
    free = complete(**repeats).choices[0].text
    assert complete(**repeats, frequency_penalty=2).choices[0].text != free
    assert complete(**repeats, presence_penalty=2).choices[0].text != free
    assert complete(**repeats, extra_body={"repetition_penalty": 1.8}).choices[0].text != free
    for more in [{"top_k": 1}, {"top_k": 40, "min_p": 0.1}, {"top_k": -1}, {"top_k": 10_000_000}]:
        complete(**hot, top_p=0.9, extra_body=more)
    assert complete(**hot, extra_body={"top_k": 1}).choices[0].text.startswith(" Paris")
    assert complete(**greedy | {"max_tokens": 40}, extra_body={"ignore_eos": True}).usage.completion_tokens == 40
    # Log-probabilities.
    told = complete(**greedy, logprobs=3).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 8
    assert all(len(top) >= 3 for top in told.top_logprobs) and told.tokens[0] == " Paris"
    assert told.token_logprobs[0] == max(told.top_logprobs[0].values()) < 0
    echo = complete(**greedy | {"max_tokens": 1}, logprobs=1, echo=True).choices[0]
    assert echo.text.startswith(FRANCE) and len(echo.logprobs.tokens) == len(ids) + 1
    assert echo.logprobs.token_logprobs[0] is None and all(x < 0 for x in echo.logprobs.token_logprobs[1:])
    again = complete(**greedy | {"max_tokens": 1}, logprobs=1, echo=True).choices[0]
    assert again.logprobs.token_logprobs == echo.logprobs.token_logprobs
    score = complete(**greedy | {"max_tokens": 0}, logprobs=0, echo=True).choices[0]
    assert score.text == FRANCE and len(score.logprobs.tokens) == len(ids)
    # What is wrong.
    bad = openai.BadRequestError
    for part, more in [
        ("temperature", {"temperature": -1}), ("top_p", {"top_p": 7}), ("max_tokens", {"max_tokens": -2}),
        ("prompt", {"prompt": ""}), ("logprobs", {"logprobs": 500}), ("suffix", {"suffix": "x"}),
        ("presence_penalty", {"presence_penalty": 9}), ("n must be", {"n": 0}),
    ]:
        refused(bad, part, complete, **greedy | more)
    for ids in ([200000], [-1], [49152]):
        refused(bad, "prompt", complete, **greedy | {"prompt": ids})
    refused(bad, "did you mean \"top_k\"", complete, **greedy, extra_body={"top_kk": 3})
    refused(bad, "context", complete, **greedy | {"prompt": "word " * 9000})
    refused(openai.NotFoundError, "does not exist", complete, **greedy | {"model": "gpt-9"})


def chats(client):
    chat = counted(client.chat.completions.create)
    greedy = dict(model=client.name, messages=ASK, temperature=0, max_completion_tokens=24)
    plain = chat(**greedy)
    message = plain.choices[0].message
    assert message.role == "assistant" and "Paris" in message.content and plain.object == "chat.completion"
    chunks = list(chat(**greedy, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    chunks = list(chat(**greedy, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens and not chunks[-1].choices
    with client.chat.completions.stream(**greedy) as stream:
        counted(lambda: None)()
        final = stream.get_final_completion()
    assert final.choices[0].message.content == message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    assert chat(**greedy | {"messages": parts}).choices[0].message.content == message.content
    chat(**greedy | {"messages": [{"role": "developer", "content": "Be brief."}, *ASK]})
    more = [*ASK, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in chat(**greedy | {"messages": more}).choices[0].message.content
    told = chat(**greedy, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(told) == plain.usage.completion_tokens and all(len(t.top_logprobs) == 2 for t in told)
    assert bytes(b for t in told[:6] for b in t.bytes).decode() in message.content
    several = chat(**greedy | {"temperature": 1.2}, n=3, seed=1)
    assert [c.index for c in several.choices] == [0, 1, 2]
    chunks = list(chat(**greedy | {"temperature": 1.2}, n=2, seed=1, stream=True))
    for i in range(2):
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
        assert text == several.choices[i].message.content
    assert chat(**greedy, stop=["Paris"]).choices[0].finish_reason == "stop"
    chat(**greedy, response_format={"type": "text"}, user="me", metadata={"a": "b"}, store=False)
    tools = chat(**greedy, tools=[WEATHER], tool_choice="auto")
    assert tools.choices[0].message is not None
    chat(**greedy, tools=[WEATHER], tool_choice="none")
    turn = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    chat(**greedy | {"messages": turn}, tools=[WEATHER])
    render = counted(client.post)("/chat/completions/render", body={"messages": ASK}, cast_to=object)
    assert render["prompt"].endswith("<|im_start|>assistant\n") and len(render["prompt_token_ids"]) == render["count"]
    bad = openai.BadRequestError
    refused(bad, "grammar", chat, **greedy, response_format={"type": "json_object"})
    refused(bad, "messages", chat, **greedy | {"messages": []})
    refused(bad, "none of", chat, **greedy | {"messages": [{"role": "king", "content": "x"}]})
    refused(bad, "text only", chat, **greedy | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})
    refused(bad, "top_logprobs", chat, **greedy, top_logprobs=2)
    refused(bad, "tool_choice", chat, **greedy, tools=[WEATHER], tool_choice="required")
    # Leaving early, and many at once.
    stream = chat(model=client.name, messages=ASK, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat(**greedy).choices[0].message.content, range(8)))
    assert set(answers) == {message.content}


def others(client, server):
    models = counted(client.models.list)().data
    assert models[0].id == client.name and models[0].max_model_len > 0
    assert counted(client.models.retrieve)(client.name).id == client.name
    refused(openai.NotFoundError, "does not exist", counted(client.models.retrieve), "none")
    refused(openai.NotFoundError, "no route", counted(client.embeddings.create), model=client.name, input="x")
    tokens = counted(client.post)("../tokenize", body={"prompt": "naïve 😀"}, cast_to=object)["tokens"]
    back = counted(client.post)("../detokenize", body={"tokens": tokens}, cast_to=object)
    assert back["prompt"] == "naïve 😀"
    refused(openai.BadRequestError, "tokens", counted(client.post), "../detokenize", body={"tokens": [10**9]}, cast_to=object)
    held = server.held()
    assert held["requests"] == held["tokens"] == 0, held


def keys(given):
    server = Served(given.engine_host, ["--api-key", "sesame"], model=given.model, plugins=given.plugins)
    right = openai.OpenAI(base_url=server.base + "/v1", api_key="sesame", max_retries=0)
    wrong = openai.OpenAI(base_url=server.base + "/v1", api_key="guess", max_retries=0)
    counted(right.models.list)()
    refused(openai.AuthenticationError, "API key", counted(wrong.models.list))
    refused(openai.AuthenticationError, "API key", counted(wrong.completions.create), model="x", prompt="x")
    assert server.stop() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-host", default=None)
    parser.add_argument("--plugins", default=ROOT / "plugins")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args()
    server = Served(given.engine_host, model=given.model, plugins=given.plugins)
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=300)
    client.name = client.models.list().data[0].id
    try:
        completions(client)
        chats(client)
        others(client, server)
    finally:
        code = server.stop()
    assert code == 0, f"the server ended with {code}"
    keys(given)
    print(f"{calls} calls of openai {openai.__version__}: all as they should be")


if __name__ == "__main__":
    sys.exit(main())
