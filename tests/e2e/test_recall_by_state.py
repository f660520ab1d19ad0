"""The micro-model of states through real processes with reuse: chunks of 64, 16 running, every token of every answer.

More checkpoints than slots for them, so that states come and go under those who read them.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.traffic import Conversation
from tests.e2e.server import Answer, Server, serving
from tests.recall_models import STATE_MODEL, known_conversations

NUM_RUNNING = 16
NUM_SLOTS = NUM_RUNNING + 8
FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "64", "--max-running-requests", str(NUM_RUNNING)),
    *("--num-pages", "400", "--context-length", "256", "--max-mamba-cache-size", str(NUM_SLOTS)),
)
TRAFFIC = RecallTraffic(
    num_documents=6, conversations_per_document=8, num_turns=5, answer_len=10, shape=DocumentShape(22, num_noise=11)
)


@pytest.mark.parametrize("decode_cache", [True, pytest.param(False, marks=pytest.mark.wide)], ids=["cache", "no-cache"])
def test_every_answer_is_right(folder: Path, decode_cache: bool) -> None:
    conversations = known_conversations(STATE_MODEL, TRAFFIC, seed=2)
    assert len(conversations) >= 0.9 * TRAFFIC.num_documents * TRAFFIC.conversations_per_document
    flags = () if decode_cache else ("--disable-decode-radix-cache",)
    with serving(folder, STATE_MODEL, *FLAGS, *flags) as server, ThreadPoolExecutor(2 * NUM_RUNNING) as pool:
        assert f"{NUM_SLOTS} recurrent states (" in server.log()
        asked = list(pool.map(lambda one: converse(server, one), conversations))
        server.wait_quiet()
    wrong = [(at, turn) for at, turns in enumerate(asked) for turn, (_, is_right) in enumerate(turns) if not is_right]
    assert not wrong
    answers = [answer for turns in asked for answer, _ in turns]
    assert sum(answer.timings["prefill_cached_tokens"] > 0 for answer in answers) > len(answers) // 8
    assert any(answer.timings["decode_cached_tokens"] > 0 for answer in answers) is decode_cache
    assert all(answer.timings["transferred_state_bytes"] > 0 for answer in answers)


def converse(server: Server, conversation: Conversation) -> list[tuple[Answer, bool]]:
    """Each turn's answer, and whether it is right."""
    context: list[int] = []
    answers = []
    for turn in conversation.turns:
        context += turn.tokens
        answer = server.complete(context, turn.output_len)
        answers.append((answer, tuple(answer.tokens) == turn.expected))
        context += answer.tokens
    return answers
