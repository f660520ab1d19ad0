"""The micro-model that looks everything up in its recurrent state, through prefill and decode with reuse.

Greedy text of an ordinary model hides a lost state; here each token of an answer is a fact of the document, which must
have come with the state, from whichever checkpoint, rank or slot.
"""

from dataclasses import replace

import pytest
import torch

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from tests.product.in_process import DECODE, PREFILL, Pages, Product, Setup
from tests.recall_models import STATE_MODEL, known_conversations

NUM_RUNNING = 16
SETUP = Setup(chunk_len=64, max_running=NUM_RUNNING, num_contexts=12, state_slots=NUM_RUNNING + 8)
"""Not every checkpoint has room."""
TRAFFIC = RecallTraffic(
    num_documents=4, conversations_per_document=4, num_turns=5, answer_len=10, shape=DocumentShape(22, num_noise=11)
)


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "page_size", "decode_cache"),
    [
        (1, 1, 16, True),
        (1, 1, 16, False),
        (1, 2, 64, True),
        (2, 1, 64, True),
        pytest.param(2, 2, 64, True, marks=pytest.mark.wide),
    ],
)
def test_every_answer_is_right(prefill_ranks: int, decode_ranks: int, page_size: int, decode_cache: bool) -> None:
    setup = replace(SETUP, decode_cache=decode_cache)
    product = Product(STATE_MODEL, prefill_ranks, decode_ranks, Pages(page_size), setup=setup)
    conversations = known_conversations(STATE_MODEL, TRAFFIC, seed=2)
    assert len(conversations) >= 14
    contexts: list[list[int]] = [[] for _ in conversations]
    prefill_hits = decode_hits = 0
    for turns in zip(*(conversation.turns for conversation in conversations), strict=True):
        prompts = [[*context, *turn.tokens] for context, turn in zip(contexts, turns, strict=True)]
        answers = product.serve(*prompts, max_tokens=TRAFFIC.answer_len)
        assert [answer.tokens for answer in answers] == [turn.expected for turn in turns]
        contexts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
        prefill_hits += sum(answer.prefill_cached_len > 0 for answer in answers)
        decode_hits += sum(answer.decode_cached_len > 0 for answer in answers)
    num_later = len(conversations) * (TRAFFIC.num_turns - 1)
    assert prefill_hits >= num_later
    assert (decode_hits >= num_later) is decode_cache
    assert product.worker(PREFILL).count("bytes_sent") > 0
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


@pytest.mark.parametrize("damage", ["lost", "foreign"])
def test_damage_to_the_states_of_the_tree_is_seen(damage: str) -> None:
    product = Product(STATE_MODEL, 1, 1, setup=SETUP)
    conversations = known_conversations(STATE_MODEL, TRAFFIC, seed=2)
    first = [conversation.turns[0] for conversation in conversations]
    product.serve(*(turn.tokens for turn in first), max_tokens=TRAFFIC.answer_len)
    (executor,) = product.worker(PREFILL).computing.executors
    for arena in executor.memory.kv.state_arenas:
        slots = arena.bytes.view(-1, arena.page_bytes)
        slots.copy_(slots.roll(1, 0) if damage == "foreign" else torch.zeros_like(slots))
    answers = product.answers(*(turn.tokens for turn in first), max_tokens=TRAFFIC.answer_len)
    assert [answer.error for answer in answers] == [None] * len(first)
    right = sum(tuple(answer.tokens) == turn.expected for answer, turn in zip(answers, first, strict=True))
    assert right < len(first) // 4
