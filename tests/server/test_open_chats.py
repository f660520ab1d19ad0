"""Chats whose last message, the assistant's, is gone on with."""

from pathlib import Path

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.agents import CHAT, MESSAGES, agents_codec
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
ASKED = {"role": "user", "content": "Count."}
HEAD = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"
CONTENTS = ("one, two,", "one, ", "<|im_", "<|im_end|>", "")


def _prompt(codec: TextCodec, engine: OracleEngine) -> str:
    ids = engine.opened[-1].prompt
    return codec.decode([int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)])


@pytest.fixture(scope="module")
def agents(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return agents_codec(model_folder, tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("form", ["text", "parts"])
async def test_the_prompt_ends_with_the_message_as_it_was_sent(codec: TextCodec, content: str, form: str) -> None:
    engine = OracleEngine()
    said = content if form == "text" else [{"type": "text", "text": part} for part in content.partition(" ") if part]
    body = {"messages": [ASKED, {"role": "assistant", "content": said}], "max_tokens": 2}
    async with served(codec, engine, SETTINGS) as case:
        for fields in ({"add_generation_prompt": False}, {}):
            reply = await case.client.post(CHAT, json=body | fields | {"continue_final_message": True})
            assert reply.status_code == 200, reply.text
            assert _prompt(codec, engine) == HEAD + content
    if content == "<|im_end|>":
        assert len(engine.opened[-1].prompt) // 4 > len(codec.encode(HEAD)) + 5, "as text, not as the token"


async def test_without_the_head_of_an_answer(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        for asked in (None, True, False):
            body = {"messages": [ASKED], "max_tokens": 2, "add_generation_prompt": asked}
            assert (await case.client.post(CHAT, json=body)).status_code == 200
            assert _prompt(codec, engine).endswith("<|im_start|>assistant\n") is (asked is not False)


async def test_a_message_of_anthropics_that_is_begun(agents: TextCodec) -> None:
    engine = OracleEngine()
    body = {"messages": [ASKED, {"role": "assistant", "content": "one, two,"}], "max_tokens": 2}
    async with served(agents, engine, SETTINGS) as case:
        assert (await case.client.post(MESSAGES, json=body)).status_code == 200
        assert _prompt(agents, engine) == HEAD + "one, two,"
        counted = await case.client.post(f"{MESSAGES}/count_tokens", json={"messages": body["messages"]})
        assert counted.json() == {"input_tokens": len(engine.opened[-1].prompt) // 4}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASKED]}, "messages"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        (
            {
                "messages": [
                    ASKED,
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                ]
            },
            "messages",
        ),
    ],
)
async def test_what_cannot_be_gone_on_with(agents: TextCodec, fields: dict[str, object], param: str) -> None:
    body = {"messages": [ASKED, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    async with served(agents, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(CHAT, json=body | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_template_that_shows_no_last_message_of_the_assistant(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "users.jinja"
    path.write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% endif %}{% endfor %}")
    codec = TextCodec.load(model_folder, template=path)
    body = {"messages": [ASKED, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(CHAT, json=body)
        assert reply.status_code == 400 and "gone on with" in reply.json()["error"]["message"]
