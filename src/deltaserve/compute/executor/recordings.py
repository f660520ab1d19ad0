"""What is recorded of an executor's steps, and that nothing more is where that failed once."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from deltaserve.compute.executor.step_recorder import StepRecorder

_log = logging.getLogger(__name__)
_FEW = 8
"""Up to here sizes of recorded steps are powers of two, from here multiples of this: little is computed in vain."""
_Made = TypeVar("_Made")


def bucket_of(count: int, most: int) -> int:
    """The number of rows, or of tokens, that so many are computed as: 1, 2, 4, 8, 16, 24, 32, ..., `most`."""
    few, many = 1 << (count - 1).bit_length(), -(-count // _FEW) * _FEW
    return min(most, few if count <= _FEW else many)


def most_tokens(graph_rows: int, max_rows: int, num_drafts: int) -> int:
    """Tokens of the largest step or pass that comes and is recorded: behind a step in which all guesses of all rows are
    right a head computes those, the token before and the one behind of each. Without guesses a row has one."""
    return min(graph_rows, max_rows * (2 + num_drafts if num_drafts else 1))


class RecordingFailed(Exception):
    """Nothing is recorded from now on, as the log says: whoever asked for it drops what it has of recordings."""


class Recordings:
    """For one thread."""

    def __init__(self, recorder: StepRecorder, none: str = "none") -> None:
        """`none`: how the log calls that these are no more."""
        self._recorder = recorder
        self._none = none
        self._has_failed = False
        self._num_recorded = 0

    @property
    def has_failed(self) -> bool:
        return self._has_failed

    def take_recorded(self) -> int:
        """Recordings made since this was asked last."""
        found, self._num_recorded = self._num_recorded, 0
        return found

    def record(self, what: str, run: Callable[[], None]) -> Callable[[], None]:
        """See StepRecorder; `what` it is, for the log. Raises RecordingFailed."""
        self._num_recorded += 1
        return self.attempt(what, partial(self._recorder.record, run))

    def record_each(self, what: str, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """See StepRecorder; `what` they are together. Raises RecordingFailed."""
        self._num_recorded += len(runs)
        return self.attempt(what, partial(self._recorder.record_each, runs))

    def attempt(self, what: str, make: Callable[[], _Made]) -> _Made:
        """What `make` returns: what has to be there to record `what`. Raises RecordingFailed where it raises anything.

        Only for the device's part. What the host does wrong in a step ends that step, and no recordings.
        """
        try:
            return make()
        except Exception as problem:  # a driver's, a library's: any of them leaves steps as they are without graphs
            reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            _log.warning("CUDA graphs: %s from now on; to record %s ends with %s", self._none, what, reason)
            self._has_failed = True
            raise RecordingFailed(what) from problem
