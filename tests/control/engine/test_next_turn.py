"""What is learnt of conversations that go on, by how many turns they have had."""

import pytest

from deltaserve.control.engine.next_turn import NextTurns
from deltaserve.core.keys import extend_keys
from deltaserve.core.tokens import pack_u32

PAGE = 4
SEED = b"s" * 16


def keys_of(*tokens: int) -> bytes:
    return extend_keys(SEED, pack_u32(tokens), PAGE)


def talk(turns: NextTurns, number: int, num_turns: int, now: float) -> None:
    """A conversation of so many turns, of which nothing is heard afterwards."""
    path: list[int] = []
    for turn in range(num_turns):
        path += [100 * number + turn] * PAGE
        before = turns.turns_before(keys_of(*path))
        assert before == turn
        path += [7] * PAGE
        turns.answered(keys_of(*path), before + 1, now)


def test_before_anything_is_known_all_go_on() -> None:
    assert NextTurns().chance(1) == NextTurns().chance(50) == 1.0


@pytest.mark.parametrize("filler", [0, 200], ids=["few are waited for", "more than pages of a prompt"])
def test_a_prompt_continues_the_longest_answer_that_it_begins_with(filler: int) -> None:
    turns = NextTurns()
    for number in range(filler):
        turns.answered(keys_of(*[1000 + number] * PAGE), 1, 0.0)
    first, second = [1] * PAGE, [2] * PAGE
    turns.answered(keys_of(*first), 1, 0.0)
    turns.answered(keys_of(*first, *second), 2, 0.0)
    assert turns.turns_before(keys_of(*first, *second, *[3] * PAGE)) == 2
    assert turns.turns_before(keys_of(*first, *[3] * PAGE)) == 1, "a branch of it"
    assert turns.turns_before(keys_of(*[9] * PAGE, *second)) == 0
    assert turns.turns_before(b"") == 0


def test_single_questions_and_long_talks_are_told_apart() -> None:
    turns = NextTurns()
    for number in range(40):
        talk(turns, number, 1, 0.0)
    for number in range(40, 50):
        talk(turns, number, 6, 0.0)
    turns.tick(1e6)
    assert turns.chance(1) < 0.3
    assert turns.chance(3) == 1.0
    assert turns.chance(6) < 0.3
    assert turns.chance(20) == 1.0, "of these nothing is known"


def test_what_changes_is_learnt_anew() -> None:
    turns = NextTurns()
    for number in range(200):
        talk(turns, number, 1, 0.0)
    turns.tick(1e6)
    assert turns.chance(1) < 0.1
    for number in range(200, 400):
        talk(turns, number, 2, 1e6)
    assert turns.chance(1) > 0.9


def test_branches_of_one_answer_count_once() -> None:
    turns = NextTurns()
    path = [1] * PAGE
    for number in range(20):  # none of these goes on
        turns.answered(keys_of(*[50 + number] * PAGE), 1, 0.0)
    turns.answered(keys_of(*path), 1, 0.0)
    for branch in range(20):
        assert turns.turns_before(keys_of(*path, *[5 + branch] * PAGE)) == 1
    turns.tick(1e6)
    assert turns.chance(1) < 0.15


def test_more_than_are_waited_for_count_as_gone() -> None:
    turns = NextTurns()
    for number in range(1000):
        turns.answered(keys_of(*[number] * PAGE), 1, 0.0)
    assert turns.chance(1) < 0.05
    assert turns.turns_before(keys_of(*[0] * PAGE, *[1] * PAGE)) == 0
    assert turns.turns_before(keys_of(*[999] * PAGE, *[1] * PAGE)) == 1


def test_an_answer_of_no_full_page_is_not_waited_for() -> None:
    turns = NextTurns()
    turns.answered(b"", 1, 0.0)
    turns.tick(1e6)
    assert turns.chance(1) == 1.0
