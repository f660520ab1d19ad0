"""How quickly decode computes prompts: measured against prefill, or assumed."""

import pytest

from deltaserve.control.engine.near import ASSUMED_PACE
from deltaserve.control.engine.own_pace import OwnPace
from deltaserve.control.sched.running import Running
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, Duo

RATE, MS = 5_000.0, 0.001


def taught(itl_target_s: float | None = None) -> tuple[Running, OwnPace]:
    """Steps take 5 ms, one more for each row, and one more for each token of a prompt."""
    duo = Duo(Shape(extend_len=64, chunk_len=64, itl_target_s=itl_target_s))
    running = duo.worker(DECODE).instance.parts.scheduler.running
    for count in (1, 2, 4, 8) * 10:
        running.step_target.learn(count, 0, 5 * MS + count * MS)
    for count in (0, 4) * 8:
        running.step_target.learn(count, 50, 5 * MS + count * MS + 50 * MS)
    pace = OwnPace(running)
    pace.extended(100.0)
    return running, pace


def test_a_token_takes_what_it_adds_and_its_share_of_the_step() -> None:
    """Steps have 64 tokens beside the rows."""
    _, own = taught()
    pace = own.pace(RATE, 4, 100.0)
    assert pace.of_row == pytest.approx(RATE * MS, rel=0.01)
    assert pace.alone == pytest.approx(RATE * (MS + 5 * MS / 64), rel=0.01)
    assert pace.beside == pytest.approx(RATE * (MS + 9 * MS / 64), rel=0.01)


def test_with_a_target_prompts_are_computed_in_what_it_leaves() -> None:
    """The rows take 9 of 19.5 ms: about ten tokens a step."""
    _, own = taught(itl_target_s=19.5 * MS)
    assert own.pace(RATE, 4, 100.0).beside == pytest.approx(RATE * 1.9 * MS, rel=0.03)


def test_what_is_not_known_or_long_ago_is_assumed() -> None:
    running, own = taught()
    assert own.pace(None, 4, 100.0) == ASSUMED_PACE, "prefill has measured nothing"
    assert OwnPace(running).pace(RATE, 4, 100.0) == ASSUMED_PACE, "no step here had a prompt"
    assert own.pace(RATE, 4, 110.0) != ASSUMED_PACE == own.pace(RATE, 4, 110.1)
    own.extended(120.0)
    assert own.pace(RATE, 4, 121.0) != ASSUMED_PACE


def test_steps_that_had_a_few_tokens_of_prompts_teach_nothing_of_long_ones() -> None:
    """They take as long as without, more or less."""
    running, own = taught()
    before = own.pace(RATE, 4, 100.0)
    for _ in range(50):
        running.step_target.learn(0, 8, 20 * MS)
    assert own.pace(RATE, 4, 100.0) == before


def test_a_few_slow_steps_change_nothing() -> None:
    running, own = taught()
    before = own.pace(RATE, 4, 100.0)
    for _ in range(7):
        running.step_target.learn(4, 50, 10.0)
    assert own.pace(RATE, 4, 100.0).of_row == pytest.approx(before.of_row, rel=0.05)
