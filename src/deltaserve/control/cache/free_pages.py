"""Free pages, handed out in runs as long as there are.

A transfer needs one descriptor for each run of consecutive pages, so a prompt should lie in few. Runs of pages are kept
by length: many pages come from the shortest run that holds them all, else from the longest ones; a single page, as a
growing request takes it, from the shortest of all, so that it breaks no long one. Pages that come back wait in a list
and are joined to runs when a take needs them or when they are as many as the runs: the work per page is constant.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain

_FEW = 64
"""Returned pages wait until they are one in so many. Not in a small pool: there, what was freed is used again soon, and
in the simulator a page that was freed too early shows."""

_Run = tuple[int, int]
"""A run of free pages: (length, first page)."""


class FreePages:
    """A set of page numbers."""

    def __init__(self, num_pages: int) -> None:
        self._runs: list[_Run] = [(num_pages, 0)] if num_pages else []  # the longest last
        self._num_in_runs = num_pages
        self._returned: list[int] = []
        self._few = num_pages // _FEW

    def __len__(self) -> int:
        return self._num_in_runs + len(self._returned)

    def __iter__(self) -> Iterator[int]:
        runs = (range(first, first + length) for length, first in self._runs)
        return chain(chain.from_iterable(runs), self._returned)

    def give_back(self, pages: Iterable[int]) -> None:
        """Pages that are not in the set."""
        self._returned += pages

    def take_one(self) -> int | None:
        """One page of the shortest run; None when there is no page."""
        if not self._num_in_runs or len(self._returned) > max(self._few, len(self._runs)):
            if not self._num_in_runs and not self._returned:
                return None
            self._join()
        self._num_in_runs -= 1
        runs = self._runs
        length, first = runs[0]
        if length > 1:
            runs[0] = (length - 1, first + 1)
        else:
            del runs[0]
        return first

    def take(self, n: int) -> list[tuple[int, int]] | None:
        """n pages as ascending runs [first, end), as few as can be had cheaply; None when there are fewer."""
        if n > self._num_in_runs or len(self._returned) > max(self._few, len(self._runs)):
            if n > len(self):
                return None
            self._join()
        self._num_in_runs -= n
        runs = self._runs
        taken = []
        while n and n > runs[-1][0]:
            length, first = runs.pop()
            taken.append((first, first + length))
            n -= length
        if n:
            taken.append(self._cut(n))
        taken.sort()
        return taken

    def _cut(self, n: int) -> tuple[int, int]:
        """n pages from the shortest run that has so many; there is one."""
        runs = self._runs
        index = bisect_left(runs, (n, 0))
        length, first = runs.pop(index)
        if length > n:
            insort(runs, (length - n, first + n), 0, index)
        return first, first + n

    def _join(self) -> None:
        """Make runs of all pages."""
        returned = self._returned
        if not returned:
            return
        returned.sort()
        parts = [(first, first + length) for length, first in self._runs]  # [first, end)
        first = end = returned[0]
        for page in returned:
            if page != end:
                parts.append((first, end))
                first = page
            end = page + 1
        parts.append((first, end))
        parts.sort()
        self._runs = runs = []
        first, end = parts[0]
        for start, stop in parts:
            if start > end:
                runs.append((end - first, first))
                first = start
            end = stop
        runs.append((end - first, first))
        runs.sort()
        self._num_in_runs += len(returned)
        self._returned = []
