"""Where the front looks for its workers."""

import asyncio

import pytest

from deltaserve.control.front.events import Member
from deltaserve.core.ids import PeerName, Role
from deltaserve.process.children.notices import PeerUp
from deltaserve.process.front import front_process
from deltaserve.process.front.front_process import members_of
from deltaserve.process.front.front_spec import FrontWorker

PREFILL = FrontWorker(name="prefill-0", role=Role.PREFILL)
DECODE = FrontWorker(name="decode-0", role=Role.DECODE, url="tcp://10.0.0.2:8998")


def test_a_first_front_looks_where_it_was_told_to() -> None:
    assert members_of((PREFILL, DECODE), ()) == (
        Member(PeerName("prefill-0"), Role.PREFILL, None),
        Member(PeerName("decode-0"), Role.DECODE, "tcp://10.0.0.2:8998"),
    )


def test_a_later_front_is_told_of_those_that_serve_already() -> None:
    """And of no others: a name that it does not route to is none of its workers."""
    ups = (
        PeerUp("prefill-0", "tcp://127.0.0.1:41", boot=1),
        PeerUp("decode-0", "tcp://127.0.0.1:42", boot=2),
        PeerUp("stranger", "tcp://127.0.0.1:43", boot=3),
    )
    assert members_of((PREFILL, DECODE), ups) == (
        Member(PeerName("prefill-0"), Role.PREFILL, "tcp://127.0.0.1:41"),
        Member(PeerName("decode-0"), Role.DECODE, "tcp://127.0.0.1:42"),
    )


@pytest.mark.anyio
async def test_a_helper_that_failed_keeps_nobody_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    is_cancelled = False

    async def fail() -> None:
        raise RuntimeError("a bug")

    async def run_on() -> None:
        nonlocal is_cancelled
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled = True

    helpers = [asyncio.create_task(each) for each in (fail(), run_on())]
    await asyncio.sleep(0)
    await front_process._end(helpers)
    assert is_cancelled
    assert "RuntimeError: a bug" in caplog.text
