"""The models of transformers that everything is compared with."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from tests.compute.executor.world import random_tokens, reference_logprobs
from tests.recall_models import STATE_MODEL, known_conversations

TRAFFIC = RecallTraffic(1, conversations_per_document=4, num_turns=2, answer_len=10, shape=DocumentShape(22))


def test_threads_that_ask_at_once_leave_the_next_model_whole(tiny_models: Path) -> None:
    """A checkpoint that no other test has, so that the threads meet where it is loaded."""
    folder = tiny_models / "qwen3_moe" / ".." / "qwen3_moe"
    with ThreadPoolExecutor(6) as pool:
        first, *others = pool.map(lambda _: reference_logprobs(folder, random_tokens(20, 1)), range(6))
    assert all(other.equal(first) for other in others)
    again = STATE_MODEL / ".." / STATE_MODEL.name
    assert len(known_conversations(again, TRAFFIC, seed=2)) == 4
