"""A worker that is only its link: a real listening socket, real frames, and answers written by the test."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from deltaserve.control.front.events import Member
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Envelope,
    Events,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    TokenRun,
    Tokens,
    Usage,
)
from deltaserve.process.links.aio import AsyncLinks
from deltaserve.process.links.links import Links
from tests.control.front.cluster import COMPAT, facts, role_of, status
from tests.patience import PATIENCE_S

FRONT = PeerName("front")
_M = TypeVar("_M")


class ScriptedWorker:
    """Answers every Hello of the front with its own and a snapshot, reports its load, and keeps what else it hears."""

    def __init__(self, name: str, boot: int, port: int = 0, hello: Hello | None = None) -> None:
        links = Links()
        self.port = links.listen("127.0.0.1", port)
        self.name, self.boot = name, boot
        self.heard: list[Message] = []
        self._hello = hello or Hello(role=self.role.value, compat=COMPAT, facts=facts())
        self._front_boot: int | None = None
        self._news = asyncio.Event()
        self._links = AsyncLinks(links, self._on_envelope)
        self._reporter = asyncio.create_task(self._report())

    @property
    def role(self) -> Role:
        return role_of(self.name)

    @property
    def member(self) -> Member:
        return Member(PeerName(self.name), self.role, f"tcp://127.0.0.1:{self.port}")

    def say(self, message: Message) -> None:
        dst_boot = None if isinstance(message, Hello) else self._front_boot
        self._links.send(FRONT, Envelope(src=self.name, src_boot=self.boot, dst_boot=dst_boot, body=message))

    def tokens(self, room: bytes, start: int, values: list[int], epoch: int = 1) -> None:
        self.say(Tokens(runs=(TokenRun(room=room, epoch=epoch, start=start, tokens=pack_u32(values)),)))

    def finished(self, room: bytes, output_len: int, epoch: int = 1) -> None:
        usage = Usage(prompt_len=40, output_len=output_len)
        self.say(Finished(room=room, epoch=epoch, usage=usage, finish=FinishReason.LENGTH))

    async def hears(self, kind: type[_M], count: int = 1) -> list[_M]:
        """All messages of a kind so far, once there are `count`."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := _of_kind(self.heard, kind)) < count:
                self._news.clear()
                await self._news.wait()
        return found

    async def vanish(self) -> None:
        """As a killed process: the port is free, nothing more is said."""
        self._reporter.cancel()
        await asyncio.gather(self._reporter, return_exceptions=True)
        self._links.close()

    def _on_envelope(self, envelope: Envelope) -> None:
        if envelope.dst_boot not in (None, self.boot):
            self._front_boot = envelope.src_boot
            self.say(Heartbeat())  # as a real worker does: its new boot says that the former is over
            return
        if isinstance(envelope.body, Hello):
            self._front_boot = envelope.src_boot
            self.say(self._hello)
            self.say(Events(first=0, stored=b"", evicted=b"", snapshot=True))
        self.heard.append(envelope.body)
        self._news.set()

    async def _report(self) -> None:
        while True:
            if self._front_boot is not None:
                self.say(status())
            await asyncio.sleep(0.25)


def _of_kind(messages: Sequence[object], kind: type[_M]) -> list[_M]:
    return [message for message in messages if isinstance(message, kind)]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is about to be true."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)
