"""Writes chat.json: templates, what they were given, and what Python's Jinja2 makes of them.

The environment is the one that Hugging Face transformers' `apply_chat_template` builds. Run with
Jinja2 3.1: `python chat_reference.py > chat.json`.
"""

import datetime
import json

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


def render(template, variables):
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env.from_string(template).render(**variables)


USER = {"role": "user", "content": "Hi <b>\"you\"</b> & 日本 😀"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello.\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Kyōto", "days": 2, "exact": True, "unit": None}}}
    ],
}
RESULT = {"role": "tool", "name": "weather", "content": "{\"t\": 21.5}"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's the weather, 'now' & here",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1, "scale": [0.5, 1e-07, 1e22]}},
                "required": ["city"],
                "empty": {},
                "none": [],
            },
        },
    }
]

TEMPLATES = {
    "turns": """{% for message in messages %}
    {% if loop.first %}{{ bos_token }}{% endif %}
    {% if message.role == 'user' %}
[user] {{ message['content'] }}
    {% elif message.role == 'assistant' %}
[assistant] {{ message.content | trim }}{{ eos_token }}
    {% else %}
[{{ message.role | upper }}] {{ message.content.strip() if message.content else 'nothing' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[assistant] {% endif %}
""",
    "whitespace": """
  {%- for m in messages -%}
  {{ m.role }}
  {%+ if loop.last %} last {% else +%} more
  {% endif %}
  {%- endfor %}

  {# a comment on its own line #}
done
""",
    "tools": """{%- if tools %}
{{- '# Tools\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}
{{ tool.function.parameters | tojson(indent=2) }}
{{ tool['function'] | tojson(indent=4, sort_keys=true) }}
{{ tool.function.description | tojson(ensure_ascii=True) }}
{{ tool | tojson(separators=(',', ':')) }}{{ tool | tojson(indent=1, separators=(';', '=')) }}{{ [[], {}, [[]]] | tojson(indent=2) }}{{ 'é' | tojson(true) }}
{%- endfor %}
{%- else %}
no tools
{%- endif %}
{%- for message in messages if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set call = call.function if call.function is defined else call %}
<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments if call.arguments is string else call.arguments | tojson }}}</tool_call>
{%- for key, value in call.arguments.items() %}
{{ key }}={{ value }};
{%- endfor %}
{%- endfor %}
{%- endfor %}
""",
    "thinking": """{%- set ns = namespace(last=-1, found=false) %}
{%- for message in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if not ns.found and message.role == 'user' and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
{%- set ns.found = true %}{%- set ns.last = index %}
{%- endif %}
{%- endfor %}
last={{ ns.last }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.content %}
{%- set content = message.content %}
{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last or enable_thinking %}
{{ '<think>' ~ reasoning ~ '</think>' }}
{%- endif %}
{{ content }}
{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
no thinking
{%- endif %}
""",
    "loop_control": """{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{{ message.role }},{% if loop.index >= 3 %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content }}
{% endgeneration %}
{%- else -%}
{%- generation -%} {{ message.role }} {%- endgeneration -%}
{% endif %}
{% endfor %}
""",
    "values": """{{ true }} {{ none }} {{ 1.0 }} {{ 3 / 2 }} {{ 7 // 2 }} {{ 2 ** 3 }} {{ [1, 'a', none, true] }} {{ {'a': 1} }}
{{ missing }}|{{ missing is defined }}|{{ messages[0].missing is none }}|{{ messages is iterable }}|{{ 'x' is string }}|{{ messages[0] is mapping }}|{{ messages is sequence }}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | list }}
{{ 'a,b,c'.split(',')[1:] | join('+') }} {{ 'Title case'.title() }} {{ 'x' * 3 }} {{ 'abc'[::-1] }} {{ 'abc'[-1] }} {{ 'a' in 'cat' }} {{ 'a-b'.replace('-', '_') }} {{ ' x '.strip() | length }}
{{ messages[0].get('name', 'nobody') }} {{ messages[0].keys() | list }} {{ range(3) | list }} {{ dict(a=1).a }} {{ [3, 1, 2] | sort | first }} {{ 'abc' | upper | lower | capitalize }}
{{ '%s is %d' | format('x', 3) }} {{ 5 | string + '!' }} {{ '7' | int + 1 }} {{ messages[-1].role }} {{ (messages | last).role }} {{ tools is none }} {{ documents is none }} {{ 'A' if false }}|{{ x | default('d') }}
""",
    "macro": """{% macro turn(role, text, end='<end>') %}
<{{ role }}>{{ text | trim }}{{ end }}
{% endmacro %}
{% for m in messages %}{{ turn(m.role, m.content or 'none') }}{{ turn(m.role, 'x', end='') }}{% endfor %}
""",
    "date": """{{ strftime_now('%d %B %Y, %H:%M') }} {% if strftime_now is defined %}{{ strftime_now("%Y-%m-%d") }}{% endif %}""",
    "content_parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for part in m.content %}{% if part.type == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}""",
    "alternate": """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant, not "' + m.role + '" at ' ~ loop.index0) }}{% endif %}{{ m.content }}{% endfor %}""",
    "attribute_of_nothing": """{{ messages[0].content.missing.deeper }}""",
}

CONVERSATIONS = {
    "plain": {"messages": [USER], "add_generation_prompt": True},
    "system": {"messages": [SYSTEM, USER, ANSWER, USER], "add_generation_prompt": False},
    "tools": {"messages": [USER, CALL, RESULT, ANSWER], "tools": TOOLS, "add_generation_prompt": True, "extra": {"enable_thinking": False}},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]}], "add_generation_prompt": False},
}

cases = []
for template_name, template in TEMPLATES.items():
    for name, conversation in CONVERSATIONS.items():
        variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None}
        variables |= {k: v for k, v in conversation.items() if k != "extra"} | conversation.get("extra", {})
        case = {"template": template_name, "conversation": name}
        try:
            case["text"] = render(template, variables)
        except jinja2.exceptions.UndefinedError:
            case["error"] = None
        except (jinja2.exceptions.TemplateError, AttributeError) as error:
            case["error"] = str(error) if "Roles" in str(error) else None
        cases.append(case)

print(json.dumps({"now": int(NOW.timestamp()), "templates": TEMPLATES, "conversations": CONVERSATIONS, "cases": cases}, ensure_ascii=False, indent=1))
