"""Which format a model's answers have, by what its template writes."""

import re
from collections.abc import Mapping

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.answers.answer_choice import FORMATS, AnswerChoice, Parsers, choose
from deltaserve.server.text.template import ChatTemplate
from tests.fixtures.source_archives import VERSIONS, published_files
from tests.fixtures.tiny_tokenizer import SPECIALS

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
EACH = "{% for k, v in c.function.arguments.items() %}ARGUMENT{% endfor %}"
DSML = "\uff5cDSML\uff5c"
CALLS: Mapping[str, tuple[str, str | None]] = {
    "hermes": (f'<tool_call>{{"name": "{NAME}", "arguments": {JSON}}}</tool_call>', "hermes"),
    "as tojson writes a function": ("<tool_call>{{ c.function | tojson }}</tool_call>", "hermes"),
    "tags": (
        f"<tool_call><function={NAME}>{EACH}</function></tool_call>".replace(
            "ARGUMENT", "<parameter={{ k }}>\n{{ v }}\n</parameter>"
        ),
        "qwen3_xml",
    ),
    "invocations": (
        f'<minimax:tool_call><invoke name="{NAME}">{EACH}</invoke></minimax:tool_call>'.replace(
            "ARGUMENT", '<parameter name="{{ k }}">{{ v }}</parameter>'
        ),
        "minimax_m2",
    ),
    "fenced JSON": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        f"<\uff5ctool\u2581sep\uff5c>{NAME}\n```json\n{JSON}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "deepseek_v3",
    ),
    "braces": (
        ("<|tool_call>call:" + NAME + "{{ '{' }}" + EACH + "{{ '}' }}<tool_call|>").replace(
            "ARGUMENT", '{{ k }}:<|"|>{{ v }}<|"|>'
        ),
        "gemma",
    ),
    "a name, then JSON": (f"[TOOL_CALLS]{NAME}[ARGS]{JSON}", "mistral"),
    "a numbered name": (f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{JSON}", "mistral"),
    "a list behind a marker": (
        f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {JSON}, "id": "{{{{ c.id }}}}"}}]',
        "mistral",
    ),
    "pairs of tags": (
        f"\n<tool_call>{NAME}\n{EACH}</tool_call>".replace(
            "ARGUMENT", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
        ),
        "glm45",
    ),
    "pairs of tags in one line": (
        f"<tool_call>{NAME}{EACH}</tool_call>".replace(
            "ARGUMENT", "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
        ),
        "glm45",
    ),
    "a section": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
    ),
    "a markup of its own": (
        f'<{DSML}function_calls>\n<{DSML}invoke name="{NAME}">\n{EACH}</{DSML}invoke>\n</{DSML}function_calls>'.replace(
            "ARGUMENT", f'<{DSML}parameter name="{{{{ k }}}}" string="true">{{{{ v }}}}</{DSML}parameter>\n'
        ),
        "deepseek_v32",
    ),
    "tags between markers of their own": (
        f"<seed:tool_call>\n<function={NAME}>\n{EACH}</function>\n</seed:tool_call>".replace(
            "ARGUMENT", "<parameter={{ k }}>{{ v }}</parameter>\n"
        ),
        "seed_oss",
    ),
    "a list with other names": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {JSON}}}\n]<|END_ACTION|>',
        "cohere",
    ),
    "a list behind a marker of Granite": (f'<|tool_call|>[{{"name": "{NAME}", "arguments": {JSON}}}]', "granite"),
    "JSON alone": (f'{{"name": "{NAME}", "parameters": {JSON}}}', "llama3_json"),
    "a list of calls": (f"[{NAME}({EACH})]".replace("ARGUMENT", '{{ k }}="{{ v }}"'), "pythonic"),
    "nobody's": (f"I call {NAME} with {JSON}", None),
    "JSON among text": (f'I call {{"name": "{NAME}", "parameters": {JSON}}}', None),
    "none": ("", None),
}


def chosen(source: str, parsers: Parsers | None = None) -> AnswerChoice:
    template = ChatTemplate(source, SPECIALS, {})
    return choose({text: token for token, text in enumerate(SPECIALS)}, template, parsers or Parsers())


@pytest.mark.parametrize("name", CALLS)
def test_a_format_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    call, branch = CALLS[name]
    assert chosen(TURNS.replace("CALL", call)).calls is (None if branch is None else FORMATS[branch])


REASONING: Mapping[str, tuple[str, tuple[str, str] | None]] = {
    "shown": (
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}",
        ("<think>", "</think>"),
    ),
    "taken off": ("{% if '</think>' in (m.content or '') %}{% endif %}", ("<think>", "</think>")),
    "a channel": (
        "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}",
        ("<|channel>thought", "<channel|>"),
    ),
    "none": ("", None),
}


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_marked_as_the_template_marks_it(name: str) -> None:
    before, wanted = REASONING[name]
    found = chosen(TURNS.replace("{{ m.content", before + "{{ m.content", 1).replace("CALL", "")).reasoning
    thinking = None if found is None else found.thinking
    assert (None if thinking is None else (thinking.begin, thinking.end)) == wanted


def test_an_operator_chooses() -> None:
    source = TURNS.replace("CALL", CALLS["hermes"][0])
    assert chosen(source, Parsers("pythonic", "think")).calls is FORMATS["pythonic"]
    assert chosen(source, Parsers("pythonic", "think")).reasoning is FORMATS["think"]
    assert chosen(source, Parsers("none", "none")) == AnswerChoice(None, None)
    for parsers, flag in ((Parsers("think"), "--tool-call-parser"), (Parsers(reasoning="x"), "--reasoning-parser")):
        with pytest.raises(ConfigError, match=flag):
            chosen(source, parsers)


PUBLISHED = {
    "Qwen-Qwen3-0.6B.jinja": ("hermes", True),
    "Qwen-Qwen2.5-7B-Instruct.jinja": ("hermes", False),
    "Qwen3-Coder.jinja": ("qwen3_xml", False),
    "Qwen3.5-4B.jinja": ("qwen3_xml", True),
    "MiniMax-M2.jinja": ("minimax_m2", True),
    "deepseek-ai-DeepSeek-V3.1.jinja": ("deepseek_v3", True),
    "llama-cpp-deepseek-r1.jinja": ("deepseek_v3", True),
    "google-gemma-4-31B-it.jinja": ("gemma", True),
    "meta-llama-Llama-3.1-8B-Instruct.jinja": ("llama3_json", False),
    "meta-llama-Llama-3.3-70B-Instruct.jinja": ("llama3_json", False),
    "openai-gpt-oss-120b.jinja": ("harmony", True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja": ("qwen3_xml", True),
    "ibm-granite-granite-4.0.jinja": ("hermes", False),
    "mistralai-Mistral-Nemo-Instruct-2407.jinja": ("mistral", False),
    "Mistral-Small-3.2-24B-Instruct-2506.jinja": ("mistral", False),
    "mistralai-Ministral-3-14B-Reasoning-2512.jinja": ("mistral", True),
    "GLM-4.6.jinja": ("glm45", True),
    "GLM-4.7-Flash.jinja": ("glm45", True),
    "moonshotai-Kimi-K2.jinja": ("kimi_k2", False),
    "Kimi-K2-Instruct.jinja": (None, False),  # changes lists, which a sandbox refuses
    "deepseek-ai-DeepSeek-V3.2.jinja": ("deepseek_v32", True),
    "deepseek-ai-DeepSeek-V4.jinja": ("deepseek_v4", True),
    "ByteDance-Seed-OSS.jinja": ("seed_oss", True),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja": ("cohere", True),
    "ibm-granite-granite-3.3-2B-Instruct.jinja": (None, True),
    "google-gemma-2-2b-it.jinja": (None, False),
}


@pytest.mark.slow
def test_formats_of_published_templates(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    archives = pytestconfig.cache.mkdir("source_archives")
    found = {}
    for package in VERSIONS:
        for file, content in published_files(package, archives, ".jinja"):
            if file in PUBLISHED:
                source = content.decode()
                control = sorted(set(re.findall(r"<[|\uff5c][^<>\s]{1,40}>", source)))
                names = {"bos_token": "<s>", "eos_token": "</s>"}
                choice = choose(
                    {text: token for token, text in enumerate(control)}, ChatTemplate(source, control, names), Parsers()
                )
                branch = next((name for name, each in FORMATS.items() if each is choice.calls), None)
                found[file] = (branch, choice.reasoning is not None)
    assert found == PUBLISHED
