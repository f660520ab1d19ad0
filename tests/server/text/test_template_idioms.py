"""What the chat templates of well-known models do: rendered here as transformers renders it."""

from collections.abc import Mapping, Sequence

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from deltaserve.server.text.template import ChatTemplate

CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "rada", "deep": {"n": [1, 2.5]}}}}
CONVERSATION: Sequence[Mapping[str, object]] = (
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "h\u00e9llo <b>&</b> 'quoted'"},
    {"role": "assistant", "content": "<think>\nhm, hm\n</think>\n\nyes", "reasoning_content": "because"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}, {"id": "c2", **CALL}]},
    {"role": "tool", "content": "ruga", "tool_call_id": "c1"},
    {"role": "tool", "content": "buse", "tool_call_id": "c2"},
    {"role": "user", "content": "and? " + "word " * 2000},
)
IDIOMS = {
    "reverse": "{%- for m in messages[::-1] %}{{- (messages|length - 1) - loop.index0 }}{{ m.role }}{%- endfor %}",
    "slices": "{{ messages[1:]|length }}{{ messages[-1].content[:5] }}{{ messages[0]['content'][2:4] }}",
    "namespace": "{%- set ns = namespace(found=false, last=0, text='') %}{%- for m in messages %}"
    "{%- if m.role == 'user' and not ns.found %}{%- set ns.found = true %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- set ns.text = ns.text + m.role ~ ';' %}{%- endfor %}{{ ns.last }}{{ ns.text }}",
    "thinking": "{%- for m in messages if '</think>' in m.content %}"
    "{{- m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}|"
    "{{- m.content.split('</think>')[-1].lstrip('\\n') }}{%- endfor %}",
    "types": "{%- for m in messages %}{{ m.content is string }}{{ m.tool_calls is defined }}{{ m is mapping }}"
    "{{ m.content is iterable and m.content is not mapping }}{{ m.nothing is none }}"
    "{{ m.x is undefined }}{%- endfor %}",
    "calls": "{%- for m in messages if m.tool_calls %}{%- for call in m.tool_calls %}"
    "{%- if call.function %}{%- set call = call.function %}{%- endif %}{{ call.name }}{{ call.arguments | tojson }}"
    "{%- for key, value in call.arguments.items() %}{{ key }}={{ value|tojson(indent=4) }}"
    "{%- if not loop.last %}, {% endif %}{%- endfor %}"
    "{%- for key, value in call.arguments|items %}{{ key }}{%- endfor %}{{ call.arguments|dictsort|list|length }}"
    "{%- endfor %}{%- endfor %}",
    "neighbours": "{%- for m in messages %}"
    "{%- if loop.first or loop.previtem.role != m.role %}[{%- endif %}{{ m.role }}"
    "{%- if loop.last or loop.nextitem.role != m.role %}]{%- endif %}{%- endfor %}",
    "macro": "{%- macro shown(m, upper=false) %}"
    "{{ m.role|upper if upper else m.role }}: {{ m.content|trim }}{%- endmacro %}"
    "{%- for m in messages %}{{ shown(m, upper=loop.first) }}{{ shown(m) }}{%- endfor %}",
    "filters": "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='content')|first }}"
    "{{ messages|map(attribute='role')|unique|sort|list }}{{ (messages|last).role|capitalize|replace('U', 'u') }}"
    "{{ nothing|default('none given') }}{{ messages[0].content|trim|length }}{{ [3, 1, 2]|sort|join('') }}"
    "{{ ['a', 'b']|select('in', ['b'])|list }}{{ {'a': 1, 'b': [2]}|tojson }}{{ 'a\\nb'|indent(2) }}{{ [1, 2]|sum }}",
    "loops": "{%- for m in messages %}{%- if m.role == 'tool' %}{%- continue %}{%- endif %}{{ m.role }}"
    "{%- if loop.index == 5 %}{%- break %}{%- endif %}{%- endfor %}"
    "{%- for i in range(3) %}{{ loop.cycle('a', 'b') }}{{ i * 2 }}{{ 'ab' * i }}{%- endfor %}",
    "text": "{{ 'Today'.upper() ~ ' ' ~ (1 + 2) }}{{ 'a,b'.split(',')|join('-') }}{{ 'x'.join(['a', 'b']) }}"
    "{{ messages[-1].content.replace('<b>', '').startswith('h') }}{{ '{}-{}'.format('a', 1) }}"
    "{{ messages[-1].content|e }}"
    "{{ ' a '.strip() }}{{ messages[0].content.title() }}{{ 'abc'[::-1] }}{{ '%02d'|length }}",
    "numbers": "{{ 7 // 2 }}{{ 7 % 2 }}{{ 1.5 * 2 }}{{ messages|length > 3 and 1 < 2 <= 2 }}"
    "{{ 10|string + '' }}{{ '3'|int + 1 }}",
    "sets": "{%- set content %}{%- for m in messages %}{{ m.role }}{%- endfor %}{%- endset %}{{ content|upper }}"
    "{%- set pair = ('a', 'b') %}{%- set x, y = pair %}{{ y }}"
    "{{ x in pair }}{%- set d = dict(a=1) %}{{ d['a'] }}{{ d.get('b', 2) }}",
    "format": "{{ '%s: %03d'|format(messages[0].role, 7) }}",
    "trained on": "{%- for m in messages %}{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}\n{%- else %}{{ m.role }}{%- endif %}{%- endfor %}",
    "JSON": "{{ messages[0]|tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages[-3]|default(messages[0])|tojson(ensure_ascii=true) }}"
    "{{ messages[-1]|tojson(indent=2, ensure_ascii=false) }}",
    "generation": "{%- if add_generation_prompt %}{{ bos_token + 'assistant' }}{%- endif %}"
    "{{ messages[-1]['content']|length }}",
}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
DEEP_CALL = {"function": {"name": "f", "arguments": {"a": "<b>"}}}
PARTS: Sequence[Mapping[str, object]] = [
    {"role": "system", "content": " Be <brief>. "},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\nc"}]},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nyes", "tool_calls": [DEEP_CALL]},
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "and now?"},
]
MORE = {
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


@pytest.mark.parametrize("name", IDIOMS)
def test_the_text_is_that_of_transformers(name: str) -> None:
    source = IDIOMS[name]
    ours = ChatTemplate(source, (), {"bos_token": "<s>"}).render(CONVERSATION, {}).text
    messages = [dict(message) for message in CONVERSATION]
    [theirs], _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert ours == theirs
    assert ours.strip()


@pytest.mark.parametrize("name", MORE)
def test_parts_and_tools_are_those_of_transformers(name: str) -> None:
    source = f"{{% if messages|length > 1 %}}{MORE[name]}{{% endif %}}"
    ours = ChatTemplate(source, (), {}).render(PARTS, {"tools": [TOOL]}).text
    messages = [dict(message) for message in PARTS]
    [theirs], _ = render_jinja_template([messages], tools=[TOOL], chat_template=source, add_generation_prompt=True)
    assert ours == theirs
    assert ours.strip()
