"""What lines of a chat mean, what is sent, and the costs in words."""

import pytest

from deltaserve.commands.chat.dialogue import (
    ChatHistory,
    ChatOrder,
    MessageLines,
    Order,
    cost_line,
    printable,
    read_message,
    totals_line,
)
from deltaserve.commands.client.chat_stream import ChatAnswer
from deltaserve.core.errors import ConfigError

TIMINGS = {
    "prefill_cached_tokens": 32,
    "decode_cached_tokens": 16,
    "transferred_bytes": 1 << 20,
    "transferred_state_bytes": 1 << 19,
}


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("Hello there", "Hello there"),
        ("  Hello ", "Hello"),
        ("", None),
        ("  ", None),
        ("/reset", ChatOrder(Order.RESET)),
        ("/EXIT", ChatOrder(Order.EXIT)),
        ("/system Be brief. ", ChatOrder(Order.SYSTEM, "Be brief.")),
        ("//etc/hosts is a file", "/etc/hosts is a file"),
    ],
)
def test_a_line_is_a_message_or_an_order(line: str, meaning: str | ChatOrder | None) -> None:
    assert read_message(line) == meaning


@pytest.mark.parametrize(
    ("line", "advice"), [("/rest", "did you mean reset?"), ("/xyz", "/help lists"), ("/", "/help")]
)
def test_an_order_that_there_is_not_is_named(line: str, advice: str) -> None:
    with pytest.raises(ConfigError, match="unknown command") as raised:
        read_message(line)
    assert advice in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b"], ["a\nb"]),
        (['"""', "a", "", "b\\", '"""', "c"], ["a\n\nb\\", "c"]),
        (["a\\", '"""', "b", '"""'], ["a\nb"]),
    ],
)
def test_lines_become_messages(lines: list[str], messages: list[str]) -> None:
    reader = MessageLines()
    assert [message for line in lines if (message := reader.add(line)) is not None] == messages
    assert not reader.has_part


def test_the_end_of_the_input_ends_a_message() -> None:
    reader = MessageLines()
    assert reader.add("a\\") is None
    assert reader.has_part
    assert reader.end() == "a"
    assert not reader.has_part


def test_the_history_is_what_is_sent() -> None:
    history = ChatHistory()
    assert history.messages("a") == [{"role": "user", "content": "a"}]
    history.add("a", "b")
    history.system = "s"
    assert [(m["role"], m["content"]) for m in history.messages("c")] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert history.undo()
    assert not history.undo()
    history.add("a", "b")
    history.reset()
    assert [m["role"] for m in history.messages("c")] == ["system", "user"]


def test_costs_of_a_server_of_ours_and_of_others() -> None:
    usage = {"prompt_tokens": 1031, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 32}}
    ours = ChatAnswer("text", {**usage, "timings": [TIMINGS]}, first_token_s=0.25, wall_s=0.75)
    assert cost_line(ours) == (
        "1,031 prompt tokens: 32 cached on prefill, 16 on decode; 1.5 MiB moved; "
        "first token 0.25 s; 11 tokens at 20.0/s"
    )
    theirs = ChatAnswer("text", usage, first_token_s=0.25, wall_s=0.75)
    assert cost_line(theirs) == "1,031 prompt tokens: 32 cached; first token 0.25 s; 11 tokens at 20.0/s"
    one = ChatAnswer("text", {"prompt_tokens": 1, "completion_tokens": 1}, first_token_s=0.25, wall_s=0.25)
    assert cost_line(one) == "1 prompt token; first token 0.25 s; 1 token"
    assert cost_line(ChatAnswer("text", None)) == "the server tells no token counts"
    assert totals_line([ours, ours]) == (
        "2 turns: 2,062 prompt tokens: 64 cached on prefill, 32 on decode; 3.0 MiB moved; 22 tokens answered"
    )
    assert totals_line([ours, theirs]) == "2 turns: 2,062 prompt tokens: 64 cached; 22 tokens answered"
    assert totals_line([]) == "no turns so far"


def test_a_models_text_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9bc\n\td é 你") == "a[2Jbc\n\td é 你"
