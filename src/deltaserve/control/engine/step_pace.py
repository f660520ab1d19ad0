"""When to plan the next step: while one computes late, so that who comes meanwhile is in it, and in time.

A prompt, or a room that has landed, waits for the end of the steps that are planned already. Planned as soon as it may
be, the step behind would add its whole length to that wait; planned shortly before the one under way ends, it adds
little. Where steps are about as short as planning takes, both would only compete for the interpreter.

Where decode and prefill divide the cores of a machine, a step that only decodes is not begun at once while prefill has
more prompts of decode's rooms than rows draw tokens: a step of two rows reads all weights as one of eight does, and
takes as much of the cores that prefill could use. Begun at a third of the pace, it has more rows, and prompts are ready
sooner.
"""

from math import inf

_LEARNS = 0.2
"""Weight of a new step that only decodes in the running mean of how long these take."""
_MARGIN = 0.15
_MIN_MARGIN_S = 0.002
"""Least margin before the expected end of a step, in seconds: it takes a part of a millisecond to plan."""
_MIN_STEP_S = 2 * _MIN_MARGIN_S
"""Shortest step behind which another one is planned."""
_STRETCH = 3.0
"""Time from the begin of a step to that of the next over its own length, where others are to have the cores."""


class StepPace:
    """The pace of one step thread. A step that ends sooner than expected is followed by one planned then."""

    def __init__(self) -> None:
        self._expected_s = 0.0

    def learn(self, seconds: float) -> None:
        """Learn from the length of a step that only decodes."""
        self._expected_s += (_LEARNS if self._expected_s else 1.0) * (seconds - self._expected_s)

    def plan_at(self, began: float) -> float:
        """When to plan behind a step that began then; infinity: not while it computes."""
        if self._expected_s < _MIN_STEP_S:
            return inf
        return began + self._expected_s - max(_MIN_MARGIN_S, _MARGIN * self._expected_s)

    def begin_at(self, began: float) -> float:
        """When to begin a step that only decodes behind one that began then, while others are to have the cores."""
        return began


class EagerPace(StepPace):
    """Where a device computes beside the host, the next step is planned at once: what is not launched when a step ends
    lets the device wait, and launching takes as long as the host needs for all of the step's layers."""

    def plan_at(self, began: float) -> float:
        return began


class SharedPace(StepPace):
    """The pace where the cores are prefill's as well."""

    def __init__(self, most_s: float | None) -> None:
        """`most_s`: the longest time between two steps that is aimed at (--itl-target-ms)."""
        super().__init__()
        self._most_s = inf if most_s is None else most_s

    def begin_at(self, began: float) -> float:
        return began + min(_STRETCH * self._expected_s, self._most_s)
