"""The sandbox of chat templates: what published templates do is left alone, what costs too much is stopped."""

import json
import sys
from collections.abc import Mapping

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deltaserve.base.errors import ConfigError
from deltaserve.server.template import ChatTemplate
from deltaserve.server.template_trial import Allowance, try_template

_DOUBLE = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
_LONG = "{% set n = namespace(s='a ' * 49999) %}{% for i in range(8) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
_COPIES = (
    "{% set n = namespace(x=0) %}{% set b = [0] * 99999 %}{% for i in range(99999) %}{% set n.x = b[:] %}{% endfor %}"
)

HOSTILE: Mapping[str, str] = {
    # lists whose copies double, and whoever walks through them
    "printed": _DOUBLE + "{% set n.x = [n.x, n.x, n.x, n.x] %}{% endfor %}{{ n.x }}",
    "as JSON": _DOUBLE + "{% set n.x = [n.x, n.x, n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "compared": _DOUBLE + "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "searched": _DOUBLE + "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x in [n.y] }}",
    "hashed": _DOUBLE + "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}[n.x] }}",
    "mappings": _DOUBLE + "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
    "mappings called": _DOUBLE + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "arguments kept": "{% set n = namespace(x=[1]) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(n.x, n.x) }}{% endfor %}{{ n.x }}",
    "arguments passed on": "{% macro f(k) %}{% if k %}{{ f(k - 1, varargs, varargs) }}"
    "{% else %}{{ varargs }}{% endif %}{% endmacro %}{{ f(60, 1) }}",
    "namespaces": "{% set m = namespace(n=1) %}{% for i in range(40) %}{% set m.n = namespace(a=m.n, b=m.n) %}"
    "{% endfor %}{{ m.n }}",
    "wide": "{{ [['x' * 99999] * 9999] * 9999 }}",
    "added up": "{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "filled": "{{ [0] | batch(99999, 'x' * 99999) | list }}",
    "mapped": "{{ ([[]] * 99999) | map('default', 'x' * 99999, true) | join | length }}",
    "from keys": "{{ {}.fromkeys(range(99999), 'x' * 99999) | length }}",
    # one step that makes a long string
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "translated": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "translated by another way": "{{ 'x' | attr('translate')({120: 'y'}) }}",
    "width in a value": "{{ '{:{w}}'.format('x', w='9999999999') }}",
    "many fields": "{{ ('{0}' * 33333).format('x' * 99999) }}",
    "format_map": "{{ '{a:999}'.format_map({'a': 1}) }}",
    "indented": "{{ ('\\n' * 99999) | indent('x' * 99999, blank=true) }}",
    "wrapped": "{{ ('x' * 99999) | wordwrap(1, wrapstring='y' * 99999) }}",
    "JSON indented": "{{ [[[[1]]]] | tojson(indent='x' * 99999) }}",
    "bytes": "{{ 'x'.encode() * 10000000000 }}",
    "marked as safe": "{{ (('x' * 99999) | escape).replace('x', 'y' * 99999) | length }}",
    "block": _LONG + "{% set x %}{% for i in range(99999) %}{{ n.s }}{% endfor %}{% endset %}",
    "block of text": "{% set x %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}",
    "kept slices": _LONG + "".join(f"{{% set a{i} = n.s[1:] %}}" for i in range(2000)),
    "kept lists": "{% set n = namespace(x=0) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x, [0] * 99999] %}{% endfor %}",
    # one step that takes long
    "product": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "searched from the end": _LONG + "{{ n.s.rfind('b' ~ n.s[:12000000]) }}",
    "stripped": _LONG + "{{ n.s.strip('b' * 99999 ~ 'a ') }}",
    "trimmed": _LONG + "{{ n.s | trim('b' * 99999 ~ 'a ') }}",
    "split": _LONG + "{{ n.s.split() | length }}",
    "sorted": _LONG + "{{ n.s | sort | length }}",
    "title": _LONG + "{{ n.s | title | length }}",
    "looked for": _LONG + "{{ ('b' ~ n.s) in n.s }}" * 2000,
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_costs_too_much_is_stopped(source: str) -> None:
    with pytest.raises(ConfigError):
        ChatTemplate(source, [], {})


# ---------------------------------------------------------------- what must go on working

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
CALL = {"function": {"name": "f", "arguments": {"a": "<b>"}}}
CHAT: list[dict[str, object]] = [
    {"role": "system", "content": " Be <brief>. "},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\nc"}]},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nyes", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "and now?"},
]
ORDINARY: Mapping[str, str] = {
    "last question": "{% set ns = namespace(at=messages|length - 1, found=false) %}{% for m in messages[::-1] %}"
    "{% set i = (messages|length - 1) - loop.index0 %}{% if m.role == 'user' and not ns.found %}"
    "{% set ns.found = true %}{% set ns.at = i %}{% endif %}{% endfor %}{{ ns.at }}",
    "thoughts": "{% for m in messages %}{% if m.content is string and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}|"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "parts": "{{ messages[1].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | map('trim')"
    " | join('\\n') }}",
    "tools": "{% for t in tools %}{{ t | tojson }}{% for n, p in t.function.parameters.properties | items %}"
    "{{ n ~ ': ' ~ p.type }}{% if not loop.last %}, {% endif %}{% endfor %}{% endfor %}",
    "calls": "{% for m in messages if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v if v is string else v | tojson }}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "macro with a namespace": "{% macro add(ns, m) %}{% set ns.n = ns.n + 1 %}{{ m.role | upper }}{% endmacro %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{{ add(ns, m) }}{% endfor %}{{ ns.n }}{{ ns is defined }}",
    "recursive macro": "{% macro kind(spec) %}{% if spec is mapping %}{ {%- for k, v in spec | dictsort %}{{ k }}:"
    "{{ kind(v) }},{% endfor -%} }{% else %}{{ spec }}{% endif %}{% endmacro %}{{ kind(tools[0]) }}",
    "lists": "{% set loop_messages = [{'role': 'x', 'content': 'y'}] + messages[1:] %}{{ loop_messages | length }}"
    "{% for m in loop_messages %}{{ m.role in ['user', 'tool'] }}{{ loop.previtem.role if loop.previtem }}{% endfor %}",
    "roles": "{{ messages | map(attribute='role') | unique | list }}{{ messages | rejectattr('role', 'in', ['user']) "
    "| list | length }}{{ (messages | groupby('role'))[0][0] }}{{ messages | last }}",
    "words": "{{ '{}-{:>4}'.format('a', 7) }}{{ 'a b'.split() }}{{ 'x' * 3 }}{{ '%s' }}{{ 'abc'[1:] }}{{ 7 // 2 * 3 }}"
    "{{ 'ab' | indent(2, true) }}{{ 'a\\n\\nb' | indent(3) }}{{ 'a\\nb' | indent('> ', blank=true) }}"
    "{{ [1, 2] | sum }}{{ 'a,b' | replace(',', ';') }}{{ none }}{{ true }}{{ 1.5 }}{{ missing }}",
    "block": "{% set x %}{% for m in messages %}{{ m.role }} {% endfor %}{% endset %}{{ x | trim }}"
    "{% filter upper %}{{ x }}{% endfilter %}",
    "caller": "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}{{ messages[0].role }}{% endcall %}",
    "breaks": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
    "{{ loop.cycle('a', 'b') }}{% endfor %}",
    "dates": "{% set d = {'a': 1} %}{{ d.get('b', 2) }}{{ d.keys() | list }}{{ dict(a=[1]).items() | list }}",
}


@pytest.mark.parametrize("source", ORDINARY.values(), ids=ORDINARY.keys())
def test_a_template_renders_as_it_does_in_jinjas_own_sandbox(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = json.dumps
    text = f"{{% if messages|length > 1 %}}{source}{{% endif %}}"
    template = ChatTemplate(text, [], {})
    expected = plain.from_string(text).render(messages=CHAT, tools=[TOOL])
    assert template.render(CHAT, {"tools": [TOOL]}).text == expected


def test_a_long_conversation_is_not_too_much() -> None:
    source = (
        "{% for m in messages %}"
        + "".join(ORDINARY[name] for name in ("words",))
        + (
            "{% if m.role == 'user' and m.content is string and m.content != '' and loop.index0 <= messages|length %}"
            "{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        )
    )
    messages = [{"role": "user", "content": "w " * 400}] * 10_000
    assert ChatTemplate(source, [], {}).render(messages, {}).text.count("<|im_start|>") == 10_000


# ---------------------------------------------------------------- the process beside


def test_a_template_is_tried_with_little_time() -> None:
    with pytest.raises(ConfigError, match="needs more than 1 s"):
        try_template(_COPIES, [], {}, Allowance(cpu_s=1))


def test_a_template_is_tried_with_little_memory() -> None:
    with pytest.raises(ConfigError, match="MemoryError"):
        try_template(_LONG, [], {}, Allowance(num_bytes=1 << 23))


def test_what_the_process_finds_is_told() -> None:
    with pytest.raises(ConfigError, match="half a surrogate pair"):
        try_template("{{ bos_token }}", [], {"bos_token": "\ud800"})
    try_template("{{ messages[0].content }}", ["<|im_end|>"], {})


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="ends the process that tries it: exit code 1"):
        try_template("{{ messages[0].content }}", [], {})
