"""Agents' loops through a real server, apart in prefill and decode: calls, results, answers, turn after turn.

The model was trained to call tools by itself (tools/calling), and what is right is known at each step.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.agents import AGENTS, Agent, Reply, right
from tests.e2e.killer import Killer
from tests.e2e.server import Server, serving
from tests.tools_model import TOOLS_MODEL, known
from tools.calling.conversations import Conversation, Message, Shape
from tools.calling.evaluate import Kind, kind_of

PAGE = 8
FLAGS = ("--page-size", str(PAGE), "--num-pages", "1024", "--chunked-prefill-size", "64")
LONG = Shape(num_tools=4, num_facts=8, num_turns=7)
NUM_AGENTS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), TOOLS_MODEL, *FLAGS, deaths=None) as started,
    ):
        yield started


def is_long(conversation: Conversation) -> bool:
    """Asks for what a tool knows, what was told and what nobody knows."""
    kinds = {kind_of(conversation, at) for at in conversation.steps()}
    return {Kind.CALL, Kind.FACT, Kind.UNKNOWN} <= kinds and len(list(conversation.steps())) >= 8


def follow(agent: Agent) -> list[tuple[Message, Reply]]:
    """All steps of a conversation; asserts that each answer is right."""
    steps = list(agent.steps())
    for message, reply in steps:
        assert reply.said == right(message)
    return steps


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", AGENTS)
def test_an_agent_calls_tells_and_goes_on(server: Server, dialect: str, is_streaming: bool) -> None:
    """What the server answered is sent back as it came; each turn computes little more than what is new in it."""
    server.flush()
    (conversation,) = known(seed=10, count=1, shape=LONG, wanted=is_long)
    steps = follow(AGENTS[dialect](server, conversation, is_streaming=is_streaming))
    assert steps[0][1].cached_len == 0
    for (_, before), (_, after) in pairwise(steps):
        kept = before.prompt_len + before.output_len - 1  # the last token was drawn and not computed
        assert after.cached_len >= kept // PAGE * PAGE
        assert after.prompt_len > after.cached_len


def test_a_call_that_nobody_takes_stays_in_the_content(server: Server) -> None:
    (conversation,) = known(seed=11, count=1, shape=LONG, wanted=is_long)
    at = next(at for at in conversation.steps() if kind_of(conversation, at) is Kind.CALL)
    asked = {
        "model": server.model,
        "messages": [*conversation.messages[:at]],
        "tools": [tool.as_json() for tool in conversation.tools],
        "temperature": 0,
        "max_tokens": 100,
    }
    expected = right(conversation.messages[at])
    messages = []
    for choice in ("auto", "none"):
        reply = server.http.post("/v1/chat/completions", json=asked | {"tool_choice": choice})
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])
    assert right(messages[0]) == expected
    assert "tool_calls" not in messages[1]
    ((name, _),) = expected[1]
    assert f'{{"name": "{name}", "arguments": ' in messages[1]["content"]


def test_a_call_by_a_grammar_is_the_one_that_the_model_makes(server: Server) -> None:
    """One call at a time is a grammar: what the model would write is in it, token by token."""
    conversations = known(seed=13, count=4, shape=LONG, wanted=is_long)
    for conversation in conversations:
        at = next(at for at in conversation.steps() if kind_of(conversation, at) is Kind.CALL)
        asked = {
            "model": server.model,
            "messages": [*conversation.messages[:at]],
            "tools": [tool.as_json() for tool in conversation.tools],
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 100,
        }
        reply = server.http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        assert right(reply.json()["choices"][0]["message"]) == right(conversation.messages[at])


def test_agents_at_once_when_a_decode_worker_is_killed(folder: Path) -> None:
    """Eight of all dialects; the worker dies while some stream of it is under way."""
    conversations = known(seed=12, count=NUM_AGENTS, shape=LONG, wanted=is_long)
    with serving(folder, TOOLS_MODEL, *FLAGS, "--decode", "2", deaths=1) as server:
        killer = Killer(server, after=200)
        agents = [
            kind(server, conversation, is_streaming=True, on_event=killer.heard)
            for kind, conversation in zip(cycle(AGENTS.values()), conversations, strict=False)
        ]
        with ThreadPoolExecutor(NUM_AGENTS) as pool:
            num_steps = [len(steps) for steps in pool.map(follow, agents)]
        assert killer.victim is not None
        assert min(num_steps) >= 8
        server.wait_back(killer.victim)
