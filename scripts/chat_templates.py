"""Renders chat templates with Python's Jinja2 as Hugging Face transformers does, and writes down what
came out, for the tests of crate `model`.

    python scripts/chat_templates.py                 # templates of ours: crates/model/tests/data
    python scripts/chat_templates.py --public DIR    # the public ones in the sources of PyPI's llama-cpp-python

Needs Jinja2 3.1. The first writes `crates/model/tests/data/chat_families.json` from the templates in
`crates/model/tests/data/templates`. The second fetches the package into DIR, renders the templates that it
ships, and runs the test that compares them with ours; they are not ours to copy, so nothing of them is kept.
"""

import argparse
import copy
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tarfile

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "crates/model/tests/data"
NOW = datetime.datetime(2025, 3, 9, 7, 5, 2, tzinfo=datetime.timezone.utc)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], []).set_lineno(line)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(name, arguments, id=None):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **call} if id else call


def function(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function(
    "get_weather",
    "It's the weather, 'now' & <here>",
    {
        "city": {"type": "string", "description": "Where, e.g. \"Kyōto\""},
        "days": {"type": "integer", "default": 1, "minimum": 0},
        "unit": {"type": "string", "enum": ["°C", "°F"]},
        "points": {"type": "array", "items": {"type": "number"}},
        "exact": {"type": ["boolean", "null"], "default": None},
    },
    ["city"],
)
SEND = function("send", "Sends.", {"to": {"type": "string"}, "body": {"type": "string"}}, ["to", "body"])
PING = {"type": "function", "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Kyōto", "days": 2, "exact": True, "unit": None, "points": [0.5, 1e-7, 1e22, -3.0], "id": 12345678901234567890}
THOUGHT = "<think>\nFirst this.\n\nThen that.\n</think>\n\nThe answer is <b>4</b>.\n"

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
ID = "call12345"


def tool(text, name="get_weather", id=ID):
    return {"role": "tool", "name": name, "tool_call_id": id, "content": text}


def conversation(*messages, **more):
    return {"messages": list(messages), "add_generation_prompt": True, **more}


CALLED = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", ARGUMENTS, ID)]}

CONVERSATIONS = {
    "one": conversation(user("Hi <b>\"you\"</b> & 日本 😀")),
    "one_closed": conversation(user("Hi"), assistant("Hello."), add_generation_prompt=False),
    "system": conversation(SYSTEM, user(" What is\n2+2? ")),
    "turns": conversation(SYSTEM, user("a"), assistant(" b "), user("c"), assistant("d\n"), user("e")),
    "turns_without_system": conversation(user("a"), assistant("b"), user("c")),
    "thought": conversation(user("2+2?"), assistant(THOUGHT), user("And 3+3?")),
    "thought_last": conversation(user("2+2?"), assistant(THOUGHT), add_generation_prompt=False),
    "reasoning": conversation(user("2+2?"), {**assistant("4"), "reasoning_content": "Easy.\n"}, user("3+3?")),
    "no_thinking": conversation(user("2+2?"), extra={"enable_thinking": False}),
    "thinking": conversation(user("2+2?"), extra={"enable_thinking": True}),
    "parts": conversation(
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]},
    ),
    "two_users": conversation(user("a"), user("b")),
    "assistant_first": conversation(assistant("a"), user("b")),
    "late_system": conversation(user("a"), SYSTEM, user("b")),
    "strange_role": conversation(user("a"), {"role": "critic", "content": "b"}),
    "no_content": conversation({"role": "user"}),
    "empty": conversation(user("")),
    "nothing": conversation(),
    "date": conversation(user("a"), extra={"date_string": "9 Mar 2025"}),
    "tools": conversation(user("Weather?"), tools=[WEATHER]),
    "tools_system": conversation(SYSTEM, user("Weather?"), tools=[WEATHER, SEND, PING]),
    "tools_in_system": conversation(SYSTEM, user("Weather?"), tools=[WEATHER], extra={"tools_in_user_message": False}),
    "no_tools": conversation(user("Weather?"), tools=[]),
    "called": conversation(user("Weather?"), CALLED, tool("{\"t\": 21.5}"), tools=[WEATHER]),
    "called_and_said": conversation(
        user("Weather?"), {**CALLED, "content": "I look.\n"}, tool("21"), assistant("It is 21."), user("Thanks"), tools=[WEATHER]
    ),
    "called_with_text": conversation(
        user("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [call("get_weather", json.dumps(ARGUMENTS, ensure_ascii=False), ID)]},
        tool("21"),
        tools=[WEATHER],
    ),
    "called_twice": conversation(
        SYSTEM,
        user("Weather there?"),
        {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"city": "A"}, ID), call("get_weather", {"city": "B"}, "call54321")]},
        tool("1"),
        tool("2", id="call54321"),
        tools=[WEATHER, SEND],
    ),
    "called_without_tools": conversation(user("Weather?"), CALLED, tool("21")),
    "result_is_object": conversation(user("Weather?"), CALLED, {**tool(""), "content": {"t": 21.5, "sky": ["<clear>"]}}, tools=[WEATHER]),
    "continued": conversation(user("Count."), assistant("1 2 "), add_generation_prompt=False, extra={"continue_final_message": True}),
    "documents": conversation(user("What is it?"), extra={"documents": [{"title": "T", "text": "It is.", "doc_id": 1}]}),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template, given):
    given = copy.deepcopy(given)
    variables = {**SPECIAL, "documents": None, **given.get("extra", {})}
    variables.update(messages=given["messages"], tools=given.get("tools"), add_generation_prompt=given["add_generation_prompt"])
    try:
        return {"text": template.render(**variables)}
    except jinja2.exceptions.TemplateError as e:
        refused = type(e) is jinja2.exceptions.TemplateError
        return {"error": " ".join(e.message.split()) if refused else ""}
    except Exception:
        return {"error": ""}


def rendered(sources):
    compiled = {name: environment().from_string(source) for name, source in sources.items()}
    cases = [
        {"template": name, "conversation": of, **render(template, given)}
        for name, template in compiled.items()
        for of, given in CONVERSATIONS.items()
    ]
    return {"now": int(NOW.timestamp()), "templates": sources, "conversations": CONVERSATIONS, "cases": cases}


def read(folder):
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def write(path, data):
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    print(f"{path}: {len(data['templates'])} templates, {len(data['cases'])} renderings")


def public(folder):
    folder.mkdir(parents=True, exist_ok=True)
    package = ["--no-deps", "--no-binary", "llama-cpp-python", "llama-cpp-python"]
    if not list(folder.glob("llama_cpp_python-*.tar.gz")):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", folder, *package], check=True)
    sources = {}
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        for member in archive:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                sources[pathlib.PurePath(member.name).stem] = archive.extractfile(member).read().decode()
    write(folder / "cases.json", rendered(sources))
    test = ["cargo", "nextest", "run", "-p", "model", "--test", "chat", "--run-ignored", "only", "-E", "test(public)"]
    environment = {**os.environ, "CHAT_TEMPLATE_CASES": str((folder / "cases.json").resolve())}
    return subprocess.run(test, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", metavar="DIR", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.public:
        sys.exit(public(arguments.public))
    write(DATA / "chat_families.json", rendered(read(DATA / "templates")))
