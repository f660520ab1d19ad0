"""Recall documents say what they say, and the expected answers follow from their tokens alone."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.commands.load.recall import (
    ASK,
    FIRST_NAME,
    NUM_NAMES,
    SEPARATOR,
    DocumentShape,
    RecallTraffic,
    expected_chain,
    make_document,
)


def facts_told(tokens: tuple[int, ...]) -> dict[int, int]:
    """Read the facts back from a document's tokens."""
    names = [token for token in tokens if token >= FIRST_NAME]
    return dict(zip(names[::2], names[1::2], strict=True))


@given(seed=st.integers(0, 1000), num_facts=st.integers(2, NUM_NAMES), num_noise=st.integers(0, 300))
def test_document_has_its_length_and_tells_one_cycle(seed: int, num_facts: int, num_noise: int) -> None:
    document = make_document(Random(seed), DocumentShape(num_facts, num_noise))
    assert len(document.tokens) == 3 * num_facts + num_noise
    assert facts_told(document.tokens) == document.successor
    assert document.tokens.count(SEPARATOR) == num_facts
    assert ASK not in document.tokens
    start = next(iter(document.successor))
    chain = expected_chain(document, start, num_facts)
    assert set(chain) == set(document.successor)
    assert chain[-1] == start


def test_a_chain_goes_round() -> None:
    document = make_document(Random(0), DocumentShape(3))
    start = next(iter(document.successor))
    chain = expected_chain(document, start, 7)
    assert chain[:3] == chain[3:6]
    assert chain[0] == document.successor[start]


@pytest.mark.parametrize("num_facts", [0, 1, NUM_NAMES + 1])
def test_impossible_documents_are_refused(num_facts: int) -> None:
    with pytest.raises(ValueError, match="num_facts"):
        DocumentShape(num_facts)


def test_traffic_shares_documents_and_knows_every_answer() -> None:
    shape = DocumentShape(num_facts=12, num_noise=5)
    traffic = RecallTraffic(2, 3, num_turns=4, answer_len=6, shape=shape)
    conversations = traffic.generate(seed=5)
    assert conversations == traffic.generate(seed=5)
    documents = [conversation.turns[0].tokens[:41] for conversation in conversations]
    assert sorted(documents.count(document) for document in set(documents)) == [3, 3]
    for conversation in conversations:
        told = facts_told(conversation.turns[0].tokens[:41])
        assert [len(turn.tokens) for turn in conversation.turns] == [43, 2, 2, 2]
        for turn in conversation.turns:
            assert turn.tokens[-2] == ASK
            name, answer = turn.tokens[-1], []
            for _ in range(turn.output_len):
                name = told[name]
                answer.append(name)
            assert turn.expected == turn.stand_in == tuple(answer)


def test_empty_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RecallTraffic(1, 1, 1, 0, DocumentShape(4)).generate(0)
