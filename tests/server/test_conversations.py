"""Messages as agents send them: what reaches the template, what is refused with its reason, what is counted."""

import logging
from collections.abc import Mapping, Sequence

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.text.template import ChatTemplate
from deltaserve.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID, SPECIALS, build_tokenizer
from tests.server.conftest import MODEL, Served, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
Messages = Sequence[Mapping[str, object]]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '#' + c.function.name + c.function.arguments }}{% endfor %}"
    "{% if m.content == 'no' %}{{ raise_exception('not no') }}{% endif %}{% endfor %}"
)
"""Wants arguments as text, reads `thinking`, shows no name."""
ASKED = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
TOLD = {"role": "tool", "content": "2", "tool_call_id": "c1"}
NO_ARGUMENTS: tuple[object, ...] = (None, "", " \n", {}, "{}")


def codec_of(template: str = TEMPLATE) -> TextCodec:
    return TextCodec(build_tokenizer().backend_tokenizer, 272, [EOS_ID], ChatTemplate(template, SPECIALS, {}))


def _num_ignored(case: Served) -> float:
    """Fields of bodies and messages."""
    (counter,) = case.front.metrics.ignored_fields.collect()
    return sum(sample.value for sample in counter.samples if sample.name.endswith("_total"))


async def prompt_of(case: Served, messages: Messages) -> str:
    reply = await case.client.post("/tokenize", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 200, reply.text
    return bytes(reply.json()["tokens"]).decode()


SAID: Mapping[str, tuple[Messages, str]] = {
    "text": ([ASKED], "[user]hi"),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        "[user]hi",
    ),
    "developer": ([{"role": "developer", "content": "be brief"}, ASKED], "[system]be brief[user]hi"),
    "arguments as text": (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOLD],
        '[user]hi[assistant]#add{"a":1}[tool]2',
    ),
    "arguments as an object": (
        [
            ASKED,
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]},
            TOLD,
        ],
        '[user]hi[assistant]#add{"a": 1}[tool]2',
    ),
    "content beside calls": (
        [ASKED, {"role": "assistant", "content": "let me", "tool_calls": [CALL]}, TOLD],
        '[user]hi[assistant]let me#add{"a":1}[tool]2',
    ),
    "result as parts": (
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {**TOLD, "content": [{"type": "text", "text": "2"}]},
        ],
        '[user]hi[assistant]#add{"a":1}[tool]2',
    ),
    **{
        name: (
            [ASKED, {"role": "assistant", "content": None, name: "hm", "tool_calls": [CALL]}, TOLD],
            '[user]hi[assistant]<hm>#add{"a":1}[tool]2',
        )
        for name in ("reasoning", "reasoning_content", "thinking")
    },
    "reasoning twice": (
        [ASKED, {"role": "assistant", "content": "yes", "reasoning": "hm", "reasoning_content": "hm"}, ASKED],
        "[user]hi[assistant]<hm>yes[user]hi",
    ),
    "reasoning as parts": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "yes"},
                ],
            },
            ASKED,
        ],
        "[user]hi[assistant]<hm>yes[user]hi",
    ),
    "parts of OpenAI's responses": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "text": "hm"}, {"type": "output_text", "text": "yes"}],
            },
            ASKED,
        ],
        "[user]hi[assistant]<hm>yes[user]hi",
    ),
    **{
        f"no arguments as {arguments!r}": (
            [
                ASKED,
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}]},
                TOLD,
            ],
            "[user]hi[assistant]#add{}[tool]2",
        )
        for arguments in NO_ARGUMENTS
    },
    "a refusal": (
        [ASKED, {"role": "assistant", "content": None, "refusal": "I will not"}, ASKED],
        "[user]hi[assistant]I will not[user]hi",
    ),
    "a refusal as a part": (
        [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]}, ASKED],
        "[user]hi[assistant]I will not[user]hi",
    ),
    "what a client library writes back": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": "yes",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            ASKED,
        ],
        "[user]hi[assistant]yes[user]hi",
    ),
}


@pytest.mark.parametrize("name", SAID)
async def test_what_was_sent_reaches_the_template(name: str) -> None:
    messages, wanted = SAID[name]
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        assert await prompt_of(case, messages) == wanted
        assert _num_ignored(case) == 0


REFUSED: Mapping[str, tuple[Messages, str, str]] = {
    "what the template refuses": ([{"role": "user", "content": "no"}], "messages", "not no"),
    "arguments that are no JSON": (
        [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a"'}}]}],
        "messages[1].tool_calls[0].function.arguments",
        "not JSON",
    ),
    "arguments that are no object": (
        [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "[1]"}}]}],
        "messages[1].tool_calls[0].function.arguments",
        "object",
    ),
    "two kinds of reasoning": (
        [ASKED, {"role": "assistant", "content": "yes", "reasoning": "hm", "thinking": "oh"}],
        "messages[1].thinking",
        "differ",
    ),
    "content and a refusal": (
        [ASKED, {"role": "assistant", "content": "yes", "refusal": "no"}],
        "messages[1].refusal",
        "either",
    ),
    "a part without its text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
        "string",
    ),
    "an image": ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "only text"),
    "no content": ([{"role": "user", "content": None}], "messages[0].content", "required"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_refused_with_the_reason(name: str) -> None:
    messages, param, reason = REFUSED[name]
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param and reason in error["message"], error


DEAF = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content or '' }}{% endfor %}"
"""A template without tool calls."""


async def test_a_turn_that_the_template_leaves_out_is_refused() -> None:
    async with served(codec_of(DEAF), OracleEngine(), SETTINGS) as case:
        messages = [ASKED, {"role": "assistant", "content": "let me", "tool_calls": [CALL]}, TOLD]
        reply = await case.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0]"
    assert "leaves out this part" in reply.json()["error"]["message"]
    assert "write it as text, or serve a model whose template shows it" in reply.json()["error"]["message"]


IGNORED: Mapping[str, Messages] = {
    "messages[].cache_control": [{**ASKED, "cache_control": {"type": "ephemeral"}}],
    "messages[].content[].cache_control": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    ],
    "messages[].tool_calls[].index": [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "index": 1}]}, TOLD],
    "messages[].tool_calls[].function.strict": [
        ASKED,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "", "strict": True}}]},
        TOLD,
    ],
    "messages[].name": [{**ASKED, "name": "ann"}],
}


@pytest.mark.parametrize("name", IGNORED)
async def test_a_part_of_a_message_that_says_nothing_here_is_counted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        with caplog.at_level(logging.WARNING, "deltaserve.server"):
            await prompt_of(case, IGNORED[name])
            await prompt_of(case, IGNORED[name])
        assert _num_ignored(case) == 2
    assert [record.message for record in caplog.records if name in record.message] != []
    assert len(caplog.records) == 1, "told once"


async def test_reasoning_that_no_turn_of_the_template_shows_is_counted() -> None:
    messages = [ASKED, {"role": "assistant", "content": "yes", "reasoning": "hm"}, ASKED]
    async with served(codec_of(DEAF), OracleEngine(), SETTINGS) as case:
        assert await prompt_of(case, messages) == "[user]hi[assistant]yes[user]hi"
        assert _num_ignored(case) == 1
