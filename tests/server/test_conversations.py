"""Messages as agents send them: what reaches the template, what is refused with its reason, what is counted."""

import json
import logging
from collections.abc import Mapping, Sequence

import pytest

from deltaserve.server.call_ids import tied
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID, SPECIALS, build_tokenizer
from tests.server.conftest import MODEL, Served, num_ignored, served
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
EMPTY: tuple[object, ...] = (None, "", [], {})
NO_ARGUMENTS: tuple[object, ...] = (None, "", " \n", {}, "{}", [], "[]", "null")


def codec_of(template: str = TEMPLATE) -> TextCodec:
    return TextCodec(build_tokenizer().backend_tokenizer, 272, [EOS_ID], ChatTemplate(template, SPECIALS, {}))


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
    **{
        f"a result that is {content!r}": (
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**TOLD, "content": content}],
            '[user]hi[assistant]#add{"a":1}[tool]',
        )
        for content in EMPTY[:3]
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
        assert num_ignored(case) == 0


def _without(part: Mapping[str, object], field: str) -> dict[str, object]:
    return {name: value for name, value in part.items() if name != field}


OPTIONAL: Mapping[str, Sequence[str]] = {
    "user": ("name", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "refusal", "audio",
             "function_call", "cache_control"),
    "assistant": ("name", "reasoning_content", "reasoning", "thinking", "refusal", "audio", "function_call",
                  "tool_call_id", "annotations"),
    "call": ("id", "type", "index"),
    "function": ("arguments", "description", "parameters", "strict"),
    "tool": ("name", "tool_call_id", "tool_calls", "refusal"),
}  # fmt: skip
"""Part of a conversation |-> its fields that may be empty."""


def _conversation(part: str, field: str, value: object) -> Messages:
    given: dict[str, dict[str, object]] = {name: {field: value} if name == part else {} for name in OPTIONAL}
    call = {**CALL, "function": {"name": "add", **given["function"]}, **given["call"]}
    said = {"role": "assistant", "content": "so", "tool_calls": [call], **given["assistant"]}
    return [{**ASKED, **given["user"]}, said, {**TOLD, **given["tool"]}]


@pytest.mark.parametrize("value", EMPTY, ids=repr)
@pytest.mark.parametrize(("part", "field"), [(part, field) for part, fields in OPTIONAL.items() for field in fields])
async def test_an_optional_field_without_a_value_is_as_if_absent(part: str, field: str, value: object) -> None:
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        assert await prompt_of(case, _conversation(part, field, value)) == "[user]hi[assistant]so#add{}[tool]2"
        assert num_ignored(case) == 0
        reply = await case.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": _conversation(part, field, value), "max_tokens": 1},
        )
        assert reply.status_code == 200


WITH_IDS = (
    "{% for m in messages %}[{{ m.role }}{{ '=' + m.tool_call_id if m.tool_call_id else '' }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '#' + c.function.name + '=' + c.id }}{% endfor %}{% endfor %}"
)
ADD, SUB = CALL, {"type": "function", "function": {"name": "sub", "arguments": "{}"}}
A_SUM, NO_ID = {"role": "tool", "content": "2"}, _without(CALL, "id")


def _called(*calls: Mapping[str, object]) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


TIED: Mapping[str, tuple[Messages, str]] = {
    "both": ([ASKED, _called(ADD), TOLD], "#add=c1[tool=c1]2"),
    "neither": ([ASKED, _called(NO_ID), A_SUM], "#add=functions.add:0[tool=functions.add:0]2"),
    "the call alone": ([ASKED, _called(ADD), A_SUM], "#add=c1[tool=c1]2"),
    "the answer alone": ([ASKED, _called(NO_ID), TOLD], "#add=c1[tool=c1]2"),
    "two, in order": (
        [ASKED, _called(NO_ID, SUB), A_SUM, {**A_SUM, "content": "0"}],
        "#add=functions.add:0#sub=functions.sub:1[tool=functions.add:0]2[tool=functions.sub:1]0",
    ),
    "two, by name": (
        [ASKED, _called(NO_ID, SUB), {**A_SUM, "name": "sub", "content": "0"}, {**A_SUM, "name": "add"}],
        "#add=functions.add:0#sub=functions.sub:1[tool=functions.add:0]2[tool=functions.sub:1]0",
    ),
    "two, as they ended": (
        [ASKED, _called(ADD, {**SUB, "id": "c2"}), {**TOLD, "tool_call_id": "c2", "content": "0"}, TOLD, ASKED],
        "#add=c1#sub=c2[tool=c1]2[tool=c2]0[user]hi",
    ),
    "one id in two turns": (
        [ASKED, _called(ADD), TOLD, _called(ADD), {**TOLD, "content": "3"}],
        "#add=c1[tool=c1]2[assistant]#add=c1[tool=c1]3",
    ),
    "none of two answered": ([ASKED, _called(ADD, {**SUB, "id": "c2"}), ASKED], "#add=c1#sub=c2[user]hi"),
    "an id that was made up for another": (
        [ASKED, _called({**ADD, "id": "functions.sub:1"}, SUB), A_SUM, {**A_SUM, "content": "0"}],
        "#add=functions.sub:1#sub=functions.sub:2[tool=functions.sub:1]2[tool=functions.sub:2]0",
    ),
    "one of two answered": (
        [ASKED, _called(NO_ID, SUB), A_SUM],
        "#add=functions.add:0#sub=functions.sub:1[tool=functions.add:0]2",
    ),
    "the system between a call and its answer": (
        [ASKED, _called(ADD), {"role": "system", "content": "so"}, TOLD],
        "#add=c1[tool=c1]2[system]so",
    ),
    "the system among answers": (
        [
            {"role": "system", "content": "first"},
            ASKED,
            _called(ADD, {**SUB, "id": "c2"}),
            {**TOLD, "tool_call_id": "c2", "content": "0"},
            {"role": "developer", "content": "so"},
            TOLD,
            {"role": "system", "content": "and"},
            ASKED,
        ],
        "#add=c1#sub=c2[tool=c1]2[tool=c2]0[system]so[system]and[user]hi",
    ),
    "numbers go on over turns": (
        [ASKED, _called(NO_ID), A_SUM, _called(SUB), A_SUM],
        "#add=functions.add:0[tool=functions.add:0]2[assistant]#sub=functions.sub:1[tool=functions.sub:1]2",
    ),
}


@pytest.mark.parametrize("name", TIED)
async def test_an_answer_is_tied_to_its_call_also_where_ids_are_missing(name: str) -> None:
    messages, wanted = TIED[name]
    async with served(codec_of(WITH_IDS), OracleEngine(), SETTINGS) as case:
        start = "[system]first" if messages[0]["role"] == "system" else ""
        assert await prompt_of(case, messages) == f"{start}[user]hi[assistant]{wanted}"


UNTIED: Mapping[str, Messages] = {
    "no call": [ASKED, A_SUM],
    "another id": [ASKED, _called(ADD), {**TOLD, "tool_call_id": "c2"}],
    "more answers than calls": [ASKED, _called(NO_ID), A_SUM, A_SUM],
    "a turn too late": [ASKED, _called(NO_ID), ASKED, A_SUM],
    "an answer twice": [ASKED, _called(ADD), TOLD, TOLD],
    "an answer twice, and none of another": [ASKED, _called(ADD, {**SUB, "id": "c2"}), TOLD, TOLD],
}


@pytest.mark.parametrize("name", UNTIED)
async def test_an_answer_without_a_call_is_refused(name: str) -> None:
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/tokenize", json={"model": MODEL, "messages": UNTIED[name]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages[{len(UNTIED[name]) - 1}].tool_call_id"


_OTHER = {**SUB, "id": "c2"}
AMBIGUOUS: Mapping[str, tuple[Messages, str, str]] = {
    "one id twice in a turn": (
        [ASKED, _called(ADD, {**SUB, "id": "c1"}), TOLD, TOLD],
        "messages[1].tool_calls[1].id",
        "messages[1].tool_calls[1].id is 'c1' again: results of calls in one turn could not be told apart",
    ),
    "one id twice, and no result": ([ASKED, _called(ADD, ADD), ASKED], "messages[1].tool_calls[1].id", "again"),
    "a result twice": (
        [ASKED, _called(ADD), TOLD, TOLD],
        "messages[3].tool_call_id",
        "messages[3].tool_call_id is 'c1' again: this call has its result",
    ),
    "a result of no call": (
        [ASKED, _called(ADD), {**TOLD, "tool_call_id": "c2"}],
        "messages[2].tool_call_id",
        "messages[2].tool_call_id is 'c2', and no call in the assistant's turn before it has this id",
    ),
    "a result without an id, and no call": (
        [ASKED, A_SUM],
        "messages[1].tool_call_id",
        "messages[1].tool_call_id is not there, and no call in the assistant's turn before it lacks a result",
    ),
    "a result of the second of two alone": (
        [ASKED, _called(ADD, _OTHER), {**TOLD, "tool_call_id": "c2"}],
        "messages[1].tool_calls[0]",
        "messages[1].tool_calls[0] has no result, and a later call of its turn has one: it could be taken for this "
        "one's",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_results_that_could_be_taken_for_another_calls_are_refused(name: str) -> None:
    messages, param, says = AMBIGUOUS[name]
    async with served(codec_of(WITH_IDS), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/tokenize", json={"model": MODEL, "messages": messages})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and says in error["message"], error


async def test_what_a_template_leaves_out_is_named_where_the_client_wrote_it() -> None:
    third_is_lost = (
        "{% for m in messages %}{% if loop.index != 3 %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}#{{ c.function.name }}{% endfor %}{% endif %}{% endfor %}"
    )
    later = {**TOLD, "tool_call_id": "c2", "content": "0"}
    async with served(codec_of(third_is_lost), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(
            "/tokenize", json={"model": MODEL, "messages": [ASKED, _called(ADD, _OTHER), later, TOLD]}
        )
    assert reply.json()["error"]["param"] == "messages[3].content", "the third that is shown is the fourth that came"


async def test_thousands_of_calls_without_ids_cost_no_square_of_time() -> None:
    """Each answer looks at its own call alone."""
    num = 15_000
    calls = [{"function": {"name": f"f{index}"}} for index in range(num)]
    answers = [{"role": "tool", "name": f"f{num - 1 - index}", "content": ""} for index in range(num)]
    found = tied([{"role": "assistant", "tool_calls": calls}, *answers])
    ids = [message.get("tool_call_id") for message in found.messages]
    assert ids[1:] == [f"functions.f{index}:{index}" for index in range(num)]
    assert found.order[1:] == [*reversed(range(1, num + 1))]


WRONG: Mapping[str, tuple[object, str, str]] = {
    "a message": ([7], "messages[0]", "is 7, expected an object"),
    "a role": ([{"role": "god"}], "messages[0].role", "is \"god\", expected 'system', "),
    "a content": ([{**ASKED, "content": 5}], "messages[0].content", "is 5, expected a string or a list"),
    "a content that is an object": ([{**ASKED, "content": {"a": 1}}], "messages[0].content", "is an object, expected"),
    "a part": ([{**ASKED, "content": [None]}], "messages[0].content[0]", "is null, expected an object"),
    "a part without a type": ([{**ASKED, "content": [{"text": "x"}]}], "messages[0].content[0].type", "without a type"),
    "a name": ([{**ASKED, "name": 5}], "messages[0].name", "is 5, expected a string"),
    "a name with a tab": ([{**ASKED, "name": "a\tb"}], "messages[0].name", "no white space but spaces inside"),
    "reasoning": ([{**ASKED, "reasoning": 5}], "messages[0].reasoning", "is 5, expected a string"),
    "calls": ([ASKED, {**_called(), "tool_calls": 5}], "messages[1].tool_calls", "is 5, expected a list"),
    "a call": ([ASKED, _called(None)], "messages[1].tool_calls[0]", "is null, expected an object"),  # type: ignore[arg-type]
    "a call's id": ([ASKED, _called({**ADD, "id": 5})], "messages[1].tool_calls[0].id", "is 5, expected a string"),
    "a call's type": ([ASKED, _called({**ADD, "type": "x"})], "messages[1].tool_calls[0].type", "expected 'function'"),
    "no function": ([ASKED, _called(_without(ADD, "function"))], "messages[1].tool_calls[0].function", "is required"),
    "a function without a name": (
        [ASKED, _called({**ADD, "function": {"name": ""}})],
        "messages[1].tool_calls[0].function.name",
        "is required",
    ),
    "arguments": (
        [ASKED, _called({**ADD, "function": {"name": "f", "arguments": 5}})],
        "messages[1].tool_calls[0].function.arguments",
        "is 5, expected a string or an object",
    ),
    "all of them": ("x" * 50, "messages", "is a string of 50 characters, expected a list"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_field_is_named_with_its_value_and_what_is_expected(name: str) -> None:
    messages, param, says = WRONG[name]
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"] and "nput should" not in error["message"], error


REFUSED: Mapping[str, tuple[Messages, str, str]] = {
    "what the template refuses": ([{"role": "user", "content": "no"}], "messages", "not no"),
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
    "calls of the user": ([{**ASKED, "tool_calls": [CALL]}], "messages[0].tool_calls", "only an assistant"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_refused_with_the_reason(name: str) -> None:
    messages, param, reason = REFUSED[name]
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        reply = await case.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param and reason in error["message"], error


NO_OBJECTS = ('{"a"', "hello", "[1]", '"x"', '{"a":' * 500 + "1" + "}" * 500)


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda text: text[:10])
async def test_arguments_that_are_no_json_object_are_told_as_they_are(arguments: str) -> None:
    """An answer that is cut has some, and every later turn of its conversation sends them back."""
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    async with served(codec_of(), OracleEngine(), SETTINGS) as case:
        prompt = await prompt_of(case, [ASKED, _called(call), TOLD])
        assert num_ignored(case) == 1
    said = json.dumps({"INVALID_JSON": arguments})
    assert prompt == f"[user]hi[assistant]#add{said}[tool]2"


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
        assert num_ignored(case) == 2
    assert [record.message for record in caplog.records if name in record.message] != []
    assert len(caplog.records) == 1, "told once"


async def test_reasoning_that_no_turn_of_the_template_shows_is_counted() -> None:
    messages = [ASKED, {"role": "assistant", "content": "yes", "reasoning": "hm"}, ASKED]
    async with served(codec_of(DEAF), OracleEngine(), SETTINGS) as case:
        assert await prompt_of(case, messages) == "[user]hi[assistant]yes[user]hi"
        assert num_ignored(case) == 1
