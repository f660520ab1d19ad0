"""Failed copies are told at the first, and then when they are twice as many."""

import pytest

from deltaserve.control.transfer.commands import PagesCopied, TransferCommand, TransferReport
from deltaserve.process.worker.tier_log import TierLog


class Reporting:
    """A plane that reports a copy that failed, and one that did not, at every poll."""

    is_closed = False

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        return []

    def poll(self, now: float) -> list[TransferReport]:
        return [PagesCopied(1, 0, 0, 0.0, "the disk is full"), PagesCopied(2, 1, 10, 0.1)]

    def is_idle(self) -> bool:
        return True

    def expect(self, is_active: bool, now: float) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def test_failures_are_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    inner = Reporting()
    plane = TierLog(inner)
    for _ in range(9):
        assert len(plane.poll(0.0)) == 2
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == ["1", "2", "4", "8"]
    assert all(line.endswith("the disk is full") for line in told)
    assert plane.is_idle()
    plane.close()
    assert inner.is_closed
