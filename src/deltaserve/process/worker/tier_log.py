"""Says when copies to or from the file under the cache fail, and why, ever more rarely: each costs only time."""

import logging

from deltaserve.control.transfer.commands import PagesCopied, TransferCommand, TransferReport
from deltaserve.control.transfer.plane_turns import DataPlane

_log = logging.getLogger(__name__)


class TierLog:
    """The plane with that file, and an ear for what it reports."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._num_failed = 0
        self._tell_at = 1

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        return self._plane.perform(command, now)

    def poll(self, now: float) -> list[TransferReport]:
        reports = self._plane.poll(now)
        for report in reports:
            if isinstance(report, PagesCopied) and report.problem is not None:
                self._failed(report.problem)
        return reports

    def _failed(self, problem: str) -> None:
        self._num_failed += 1
        if self._num_failed >= self._tell_at:
            self._tell_at = 2 * self._num_failed
            count = self._num_failed
            _log.warning("%d copies to or from the file under the cache failed; the last one: %s", count, problem)

    def is_idle(self) -> bool:
        return self._plane.is_idle()

    def expect(self, is_active: bool, now: float) -> None:
        self._plane.expect(is_active, now)

    def close(self) -> None:
        self._plane.close()
