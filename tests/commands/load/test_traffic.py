"""Generated traffic: exact lengths, shared prefixes, repeatable."""

from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.commands.load.traffic import Lengths, MultiTurnTraffic, SharedPrefixTraffic, TokenRange, arrival_times

LENGTHS = Lengths(system_prompt_len=40, question_len=10, output_len=6)


def test_shared_prefix_has_exact_lengths_and_one_prefix_per_group() -> None:
    conversations = SharedPrefixTraffic(num_groups=3, prompts_per_group=4, lengths=LENGTHS).generate(seed=7)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    assert len(conversations) == len(turns) == 12
    assert {len(turn.tokens) for turn in turns} == {50}
    assert {turn.output_len for turn in turns} == {6}
    prefixes = [turn.tokens[:40] for turn in turns]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({turn.tokens for turn in turns}) == 12


def test_groups_are_interleaved() -> None:
    conversations = SharedPrefixTraffic(num_groups=4, prompts_per_group=8, lengths=LENGTHS).generate(seed=0)
    prefixes = [conversation.turns[0].tokens[:40] for conversation in conversations]
    changes = sum(before != after for before, after in pairwise(prefixes))
    assert changes > 3


def test_multi_turn_starts_with_a_common_prompt_and_adds_questions() -> None:
    conversations = MultiTurnTraffic(num_conversations=3, num_turns=4, lengths=LENGTHS).generate(seed=7)
    assert [len(conversation.turns) for conversation in conversations] == [4, 4, 4]
    assert len({conversation.turns[0].tokens[:40] for conversation in conversations}) == 1
    assert [len(turn.tokens) for turn in conversations[0].turns] == [50, 10, 10, 10]
    assert all(len(turn.stand_in) == turn.output_len == 6 for turn in conversations[0].turns)
    assert conversations[0].turns[0].expected is None


def test_equal_seeds_give_equal_traffic() -> None:
    traffic = MultiTurnTraffic(2, 2, Lengths(8, 8, 8, range_ratio=0.25))
    assert traffic.generate(1) == traffic.generate(1)
    assert traffic.generate(1) != traffic.generate(2)


@given(ratio=st.floats(0, 1), seed=st.integers(0, 1000), length=st.integers(1, 50))
def test_lengths_stay_within_the_range_ratio(ratio: float, seed: int, length: int) -> None:
    lengths = Lengths(length, length, length, ratio)
    conversations = SharedPrefixTraffic(2, 3, lengths, TokenRange(5, 8)).generate(seed)
    shortest = max(1, int(ratio * length))
    for conversation in conversations:
        (turn,) = conversation.turns
        assert 2 * shortest <= len(turn.tokens) <= 2 * length
        assert shortest <= turn.output_len <= length
        assert set(turn.tokens) <= {5, 6, 7}


def test_no_system_prompt_means_none() -> None:
    conversations = SharedPrefixTraffic(2, 1, Lengths(0, 5, 1, 0.5)).generate(3)
    assert all(1 <= len(conversation.turns[0].tokens) <= 5 for conversation in conversations)


def test_arrivals_are_poisson_or_all_at_once() -> None:
    assert arrival_times(3, None, seed=0) == [0.0, 0.0, 0.0]
    times = arrival_times(4000, rate=20.0, seed=0)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0.0
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert times == arrival_times(4000, rate=20.0, seed=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenRange(5, 5),
        lambda: TokenRange(-1, 5),
        lambda: Lengths(1, 0, 1),
        lambda: Lengths(1, 1, 0),
        lambda: Lengths(1, 1, 1, 1.5),
        lambda: arrival_times(1, 0.0, 0),
        lambda: SharedPrefixTraffic(0, 1, LENGTHS).generate(0),
        lambda: MultiTurnTraffic(1, 0, LENGTHS).generate(0),
    ],
)
def test_senseless_settings_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"must be|cannot be|is empty"):
        make()
