"""The same links in an event loop."""

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Envelope
from deltaserve.process.links.aio import AsyncLinks
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.links import Links
from tests.event_loops import both_loops, run_in
from tests.patience import PATIENCE_S
from tests.process.links.frames import address, envelope, receive, send_garbage

WORKER, FRONT = PeerName("decode-0"), PeerName("front")


class Inbox:
    """What a front heard, and a way to wait for it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Envelope] = asyncio.Queue()

    def __call__(self, heard: Envelope) -> None:
        self._queue.put_nowait(heard)

    async def take(self, count: int) -> list[Envelope]:
        async with asyncio.timeout(PATIENCE_S):
            return [await self._queue.get() for _ in range(count)]


@asynccontextmanager
async def front(inbox: Callable[[Envelope], None], limits: LinkLimits | None = None) -> AsyncIterator[AsyncLinks]:
    links = AsyncLinks(Links(limits=limits or LinkLimits()), inbox)
    try:
        yield links
    finally:
        links.close()


@both_loops
def test_a_front_hears_every_frame_of_a_burst(loop: str, make_links: Callable[..., Links]) -> None:
    worker = make_links()
    port = worker.listen("127.0.0.1", 0)

    async def talk() -> None:
        inbox = Inbox()
        async with front(inbox, LinkLimits(frames_per_turn=7)) as links:
            links.dial(address(WORKER, port))
            assert links.send(WORKER, envelope(FRONT))
            await asyncio.to_thread(receive, worker)
            for i in range(500):
                worker.send(FRONT, envelope(WORKER, boot=i))
            assert [e.src_boot for e in await inbox.take(500)] == list(range(500))

    run_in(loop, talk())


@both_loops
def test_frames_that_cross_are_not_lost(loop: str, make_links: Callable[..., Links]) -> None:
    """A send may swallow the descriptor's signal of a frame that arrived meanwhile."""
    worker = make_links()
    port = worker.listen("127.0.0.1", 0)

    async def talk() -> None:
        inbox = Inbox()
        async with front(inbox) as links:
            links.dial(address(WORKER, port))
            for i in range(300):
                links.send(WORKER, envelope(FRONT, boot=i))
                links.send(WORKER, envelope(FRONT, boot=i))
                heard = await asyncio.to_thread(receive, worker, 2)
                assert [e.src_boot for e in heard] == [i, i]
                worker.send(FRONT, envelope(WORKER, boot=i))
                links.send(WORKER, envelope(FRONT, boot=i))
                assert [e.src_boot for e in await inbox.take(1)] == [i]
                await asyncio.to_thread(receive, worker)

    run_in(loop, talk())


@both_loops
def test_hang_up_and_dial_again(loop: str, make_links: Callable[..., Links]) -> None:
    worker = make_links()
    port = worker.listen("127.0.0.1", 0)

    async def talk() -> None:
        inbox = Inbox()
        async with front(inbox) as links:
            for i in range(3):
                links.dial(address(WORKER, port))
                links.send(WORKER, envelope(FRONT, boot=i))
                assert (await asyncio.to_thread(receive, worker))[0].src_boot == i
                worker.send(FRONT, envelope(WORKER, boot=i))
                assert (await inbox.take(1))[0].src_boot == i
                links.hang_up(WORKER)
                assert not links.send(WORKER, envelope(FRONT))

    run_in(loop, talk())


@both_loops
def test_a_front_may_listen_too(loop: str, make_links: Callable[..., Links]) -> None:
    worker = make_links()

    async def talk() -> None:
        inbox = Inbox()
        listening = Links()
        worker.dial(address(FRONT, listening.listen("127.0.0.1", 0)))
        links = AsyncLinks(listening, inbox)
        worker.send(FRONT, envelope(WORKER, boot=5))
        assert (await inbox.take(1))[0].src_boot == 5
        links.send(WORKER, envelope(FRONT, boot=6))
        assert (await asyncio.to_thread(receive, worker))[0].src_boot == 6
        links.close()

    run_in(loop, talk())


@both_loops
def test_a_front_hears_over_a_link_that_was_dialled_again(loop: str, make_links: Callable[..., Links]) -> None:
    """Garbage ended the first connection; the second one is another socket."""
    worker = make_links()

    async def talk() -> None:
        inbox = Inbox()
        async with front(inbox, LinkLimits(redial_s=0.05)) as links, asyncio.timeout(PATIENCE_S):
            with sockets.create_server(("127.0.0.1", 0)) as garbler:
                port = garbler.getsockname()[1]
                links.dial(address(WORKER, port))
                await asyncio.to_thread(send_garbage, garbler)
            worker.listen("127.0.0.1", port)
            while not worker.wait(0.02):
                links.send(WORKER, envelope(FRONT))
                await asyncio.sleep(0.01)
            receive(worker)
            worker.send(FRONT, envelope(WORKER))
            assert [heard.src for heard in await inbox.take(1)] == [WORKER]

    run_in(loop, talk())


@both_loops
def test_a_front_hears_that_a_connection_ended(loop: str, make_links: Callable[..., Links]) -> None:
    worker = make_links()
    port = worker.listen("127.0.0.1", 0)

    async def talk() -> None:
        broken: asyncio.Queue[PeerName] = asyncio.Queue()
        links = AsyncLinks(Links(), lambda heard: None, broken.put_nowait)
        try:
            links.dial(address(WORKER, port))
            assert links.send(WORKER, envelope(FRONT))
            await asyncio.to_thread(receive, worker)
            worker.close()
            assert await asyncio.wait_for(broken.get(), PATIENCE_S) == WORKER
        finally:
            links.close()

    run_in(loop, talk())
