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
"""Weight of a new step in the running mean of how long its kind takes."""
_MARGIN = 0.15
_MIN_MARGIN_S = 0.002
"""Least margin before the expected end of a step, in seconds: it takes a part of a millisecond to plan."""
_MIN_STEP_S = 2 * _MIN_MARGIN_S
"""Shortest step behind which another one is planned."""
_STRETCH = 3.0
"""Time from the begin of a step to that of the next over its own length, where others are to have the cores."""
_TELLING_SPREAD = 0.01
"""Least variance of numbers of tokens, over their mean square, that tells what a token takes from what a step does."""
_LAUNCH_S = 0.010
"""A step with prompts that a GPU computes in less time takes about as long to launch."""


def _learned(mean: float, new: float) -> float:
    return mean + (_LEARNS if mean else 1.0) * (new - mean)


def _late_in(began: float, expected_s: float) -> float:
    return began + expected_s - max(_MIN_MARGIN_S, _MARGIN * expected_s)


class StepPace:
    """The pace of one step thread. A step that ends sooner than expected is followed by one planned then."""

    def __init__(self) -> None:
        self._expected_s = 0.0

    def learn(self, seconds: float, num_extended: int) -> None:
        """Learn from the length of a step that has computed so many tokens of prompts."""
        if not num_extended:
            self._expected_s = _learned(self._expected_s, seconds)

    def plan_at(self, began: float, num_extended: int) -> float:
        """When to plan behind a step that began then and computes so many tokens of prompts; infinity: not while it
        computes."""
        if self._expected_s < _MIN_STEP_S or num_extended:
            return inf
        return _late_in(began, self._expected_s)

    def begin_at(self, began: float) -> float:
        """When to begin a step that only decodes behind one that began then, while others are to have the cores."""
        return began


class EagerPace(StepPace):
    """Where a device computes beside the host, the next step is planned at once: what is not launched when a step ends
    lets the device wait, and launching takes as long as the host needs for all of the step's layers. Behind a step with
    prompts that takes longer than that it is planned late in it."""

    def __init__(self) -> None:
        super().__init__()
        self._with_prompts = _Line()

    def learn(self, seconds: float, num_extended: int) -> None:
        super().learn(seconds, num_extended)
        if num_extended:
            self._with_prompts.learn(num_extended, seconds)

    def plan_at(self, began: float, num_extended: int) -> float:
        if not num_extended:
            return began
        expected_s = self._with_prompts.seconds(num_extended)
        if expected_s is None:
            return inf
        return began if expected_s < _LAUNCH_S else _late_in(began, expected_s)


class _Line:
    """Seconds over tokens: the straight line through what was learned, of which the last weighs most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._squares = self._products = 0.0
        """Running means, the last two of tokens * tokens and of tokens * seconds."""

    def learn(self, tokens: int, seconds: float) -> None:
        self._tokens = _learned(self._tokens, tokens)
        self._seconds = _learned(self._seconds, seconds)
        self._squares = _learned(self._squares, tokens * tokens)
        self._products = _learned(self._products, tokens * seconds)

    def seconds(self, tokens: int) -> float | None:
        """Expected of so many tokens. None: nothing was learned."""
        if not self._tokens:
            return None
        spread = self._squares - self._tokens**2
        per_token = self._seconds / self._tokens
        if spread > _TELLING_SPREAD * self._squares:
            per_token = min(per_token, max(0.0, (self._products - self._tokens * self._seconds) / spread))
        return self._seconds + per_token * (tokens - self._tokens)


class SharedPace(StepPace):
    """The pace where the cores are prefill's as well."""

    def __init__(self, most_s: float | None) -> None:
        """`most_s`: the longest time between two steps that is aimed at (--itl-target-ms)."""
        super().__init__()
        self._most_s = inf if most_s is None else most_s

    def begin_at(self, began: float) -> float:
        return began + min(_STRETCH * self._expected_s, self._most_s)
