"""A worker that meets no peer opens no transport; one that does opens it then, or says why it cannot."""

import errno
import os
from dataclasses import dataclass, field

import pytest

from deltaserve.control.transfer.commands import (
    CloseGate,
    EndpointFailed,
    EndpointOpened,
    FencePeer,
    ForgetPages,
    OpenEndpoint,
    PeerFenced,
    TicketId,
    TransferCommand,
    TransferReport,
)
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot, PeerName, TicketSeq
from deltaserve.core.transport import FenceResult
from deltaserve.process.worker.plane_on_demand import PlaneOnDemand
from deltaserve.sim.loopback import Fabric
from tests.process.worker.test_transfer_thread import Side

PEER = PeerName("prefill-0")
TICKET = TicketId(Boot(1), Boot(2), TicketSeq(1))


@dataclass
class Opener:
    """Opens a real endpoint over the loopback transport, and counts how often it was asked to."""

    num_opened: int = 0
    sides: list[Side] = field(default_factory=list)

    def __call__(self) -> Side:
        self.num_opened += 1
        self.sides.append(Side(PeerName("unified-0"), Fabric()))
        return self.sides[-1]


def refuse() -> Side:
    raise ConfigError("no library")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (FencePeer(PEER), [PeerFenced(PEER, FenceResult.CLOSED)]),
        (CloseGate(PEER, TICKET), []),
        (ForgetPages(PEER, TICKET), []),
    ],
)
def test_nothing_but_an_endpoint_opens_it(command: TransferCommand, answer: list[TransferReport]) -> None:
    opener = Opener()
    plane = PlaneOnDemand(opener)
    assert plane.perform(command, 0.0) == answer
    assert plane.poll(0.1) == []
    assert plane.is_idle()
    plane.expect(True, 0.2)
    plane.close()
    assert opener.num_opened == 0


def test_the_first_endpoint_opens_it_and_the_second_finds_it_open() -> None:
    opener = Opener()
    plane = PlaneOnDemand(opener)
    for greeting in (1, 2):
        (opened,) = plane.perform(OpenEndpoint(PEER, greeting), 0.0)
        assert isinstance(opened, EndpointOpened)
    assert opener.num_opened == 1
    plane.poll(0.1)
    assert opener.sides[0].num_polls == 1
    assert plane.perform(FencePeer(PEER), 0.2) == [PeerFenced(PEER, FenceResult.CLOSED)]


def test_a_transport_that_cannot_be_opened_fails_the_endpoint_and_not_the_worker() -> None:
    plane = PlaneOnDemand(refuse)
    assert plane.perform(OpenEndpoint(PEER, 7), 0.0) == [EndpointFailed(PEER, 7, "no library")]
    assert plane.is_idle()


def test_a_transport_for_which_the_machine_lacks_something_fails_the_endpoint_too() -> None:
    """The worker serves on, by itself."""

    def lack() -> Side:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    plane = PlaneOnDemand(lack)
    (failed,) = plane.perform(OpenEndpoint(PEER, 7), 0.0)
    assert isinstance(failed, EndpointFailed)
    assert "ulimit -n" in failed.message
    assert plane.is_idle()
