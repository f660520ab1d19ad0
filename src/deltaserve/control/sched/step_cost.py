"""What a step costs, learnt from the steps: one of T tokens without prompts takes about c0 + c1 T seconds."""

from statistics import median_low

_FORGETS = 0.02
"""Weight of a new step in the means; old ones fade: what else runs on the machine changes the cost, as do context
lengths."""
_MIN_STEPS = 8.0
"""Fewest steps to remember, of lengths that differ by `_MIN_SPREAD` tokens, before c0 and c1 are told apart."""
_MIN_SPREAD = 0.5
_ANY = 1 << 30
_CLEARLY = 0.9
_OUTLIER = 2.0
"""A step that took longer than so many times what was expected counts as that: something else was in the way."""
_NUM_FIRST = 8
_FIRST_OUTLIER = 4.0
"""The same for the first steps, of what half of them took at most: those that compile and allocate are among them."""


class StepCost:
    """c0 and c1 by least squares over the last steps without prompts."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self._line: tuple[float, float] | None = None
        self._first: list[tuple[int, float]] = []

    @property
    def price(self) -> float | None:
        """c1 / c0: what a token costs, in costs of an empty step. None: not known yet."""
        return None if self._line is None else self._line[1] / self._line[0]

    def seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens takes. None: no step was seen yet.

        While c0 and c1 are not told apart: as if all of it were tokens, which is more than a longer step takes.
        """
        if self._line is not None:
            return self._line[0] + self._line[1] * num_tokens
        return self._seconds / self._tokens * num_tokens if self._tokens else None

    def fitting(self, seconds: float) -> int | None:
        """Tokens of a step that takes no longer. None: no step was seen yet.

        One more than steps had lately, at least, where these were clearly shorter: c1 may be taken for too much. While
        c0 and c1 are not told apart: one more, or one less.
        """
        if not self._weight:
            return None
        had, took = round(self._tokens / self._weight), self._seconds / self._weight
        is_short = took <= _CLEARLY * seconds
        if self._line is None:
            return had + 1 if is_short else had - 1
        fixed, slope = self._line
        fits = int((seconds - fixed) / slope) if slope > 0.0 else _ANY if fixed <= seconds else 0
        return max(fits, had + 1) if is_short else fits

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step without prompts has computed `num_tokens`."""
        if seconds <= 0:
            return
        if len(self._first) < _NUM_FIRST:
            self._first.append((num_tokens, seconds))
            self._sum_first()
        else:
            self._add(num_tokens, min(seconds, _OUTLIER * self._seconds / self._weight))
        self._fit()

    def _sum_first(self) -> None:
        """The sums anew: which of the first steps were slow shows when there are quick ones beside them."""
        most = _FIRST_OUTLIER * median_low(seconds for _, seconds in self._first)
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        for num_tokens, seconds in self._first:
            self._add(num_tokens, min(seconds, most))

    def _add(self, num_tokens: int, seconds: float) -> None:
        keep = 1.0 - _FORGETS
        self._weight = self._weight * keep + 1.0
        self._tokens = self._tokens * keep + num_tokens
        self._squares = self._squares * keep + num_tokens * num_tokens
        self._seconds = self._seconds * keep + seconds
        self._products = self._products * keep + num_tokens * seconds

    def _fit(self) -> None:
        mean = self._tokens / self._weight
        spread = self._squares / self._weight - mean * mean
        is_spread = self._weight >= _MIN_STEPS and spread >= _MIN_SPREAD * _MIN_SPREAD
        if self._line is None and not is_spread:
            return
        mean_s = self._seconds / self._weight
        slope = self._line[1] if self._line is not None else 0.0
        if is_spread:
            slope = max(0.0, (self._products / self._weight - mean * mean_s) / spread)
        fixed = max(mean_s - slope * mean, 0.01 * mean_s)
        self._line = fixed, slope
