"""How much may be inside at a time: requests that wait, bytes of bodies, what these are read to. Tenants have fair
shares of the first two."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace
from deltaserve.server.api_errors import ApiError, retry_after
from deltaserve.server.settings import ServerSettings

_PLACES_PER_FREE_ONE = 4
"""A tenant may have so many places for each one that is free: alone 4/5 of all, two that flood us 4/9 each, and so on.
Whoever comes next always finds room."""


def _exceeds_share(settings: ServerSettings, mine: int, free: int) -> bool:
    """Whether one tenant of several has as much as it may have while so much is free for all."""
    return settings.num_tenants > 1 and mine >= _PLACES_PER_FREE_ONE * free


@dataclass(eq=False, slots=True)
class Admitted:
    """One request's place: the samples of it that wait for their first token, and its prompts. Given back once."""

    tenant: Namespace
    num_waiting: int = 1
    """A request counts as one sample until it is read."""
    num_running: int = 0
    num_tokens: int = 0
    is_open: bool = True


@dataclass(slots=True)
class Admission:
    """Counts the samples and prompt tokens that wait, samples per tenant as well. Nobody is held here: full means 429.

    Samples that have their first token do not count: how many run is the workers' business.
    """

    settings: ServerSettings
    num_requests: int = 0
    """All that are inside, waiting or not."""
    num_running: int = 0
    """Samples that have their first token, until their request ends."""
    num_tokens: int = 0
    _waiting: Counter[Namespace] = field(default_factory=Counter)

    @property
    def num_waiting(self) -> int:
        """Samples before their first token."""
        return self._waiting.total()

    def enter(self, tenant: Namespace) -> Admitted:
        """Take a place before the body is parsed; its fair share, where there are several. Raises ApiError 429."""
        num_free = self.settings.max_queue - self.num_waiting
        if num_free <= 0:
            raise self._full(f"{self.num_waiting} of {self.settings.max_queue} places are taken")
        if _exceeds_share(self.settings, self._waiting[tenant], num_free):
            message = f"this key has {self._waiting[tenant]} places and {num_free} are left for all"
            raise ApiError(429, "rate_limited", message, headers=retry_after())
        place = Admitted(tenant)
        self._waiting[tenant] += 1
        self.num_requests += 1
        return place

    def book(self, place: Admitted, num_samples: int, num_tokens: int) -> None:
        """Add what the request is, once it is read. Raises ApiError 429. A request that waits alone always fits."""
        others = self.num_waiting - place.num_waiting
        if others:
            most = self.settings.max_queue
            if others + num_samples > most:
                raise self._full(f"{self.num_waiting} of {most} places are taken, {num_samples} are needed")
            if self.num_tokens + num_tokens > self.settings.max_queue_tokens:
                raise self._full(f"{self.num_tokens} of {self.settings.max_queue_tokens} prompt tokens are taken")
        self._add(place, num_samples - place.num_waiting, num_tokens)

    def start(self, place: Admitted) -> None:
        """One of its samples has its first token."""
        place.num_running += 1
        self.num_running += 1
        self._add(place, -1, -place.num_tokens if place.num_waiting == 1 else 0)

    def leave(self, place: Admitted) -> None:
        """Give the place back. Raises StateError the second time."""
        if not place.is_open:
            raise StateError("a place in the queue was given back twice")
        place.is_open = False
        self.num_requests -= 1
        self.num_running -= place.num_running
        self._add(place, -place.num_waiting, -place.num_tokens)

    @contextmanager
    def place(self, tenant: Namespace) -> Iterator[Admitted]:
        """A place from `enter` to `leave`."""
        place = self.enter(tenant)
        try:
            yield place
        finally:
            self.leave(place)

    def _add(self, place: Admitted, num_samples: int, num_tokens: int) -> None:
        place.num_waiting += num_samples
        place.num_tokens += num_tokens
        self.num_tokens += num_tokens
        self._waiting[place.tenant] += num_samples
        if not self._waiting[place.tenant]:
            del self._waiting[place.tenant]

    @staticmethod
    def _full(why: str) -> ApiError:
        return ApiError(429, "overloaded", f"the server is full: {why}", headers=retry_after())


@dataclass(slots=True)
class Held:
    """Bytes that one body holds."""

    tenant: Namespace
    num_bytes: int = 0


@dataclass(slots=True)
class Bodies:
    """Bytes of all bodies that are read now and not yet a job. Nobody waits here: full means 429 now."""

    settings: ServerSettings
    _held: Counter[Namespace] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    @contextmanager
    def one(self, tenant: Namespace) -> Iterator[Held]:
        """A body, from its first byte until it is a job."""
        held = Held(tenant)
        try:
            yield held
        finally:
            self._held[tenant] -= held.num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    def grow(self, held: Held, num_bytes: int) -> None:
        """More of it has come. Where there are several tenants each has a fair share. Raises ApiError 429."""
        free = self.settings.http.max_bodies_bytes - self.num_bytes
        if num_bytes > free or _exceeds_share(self.settings, self._held[held.tenant], free):
            message = f"the server is full: bodies of {self.num_bytes} bytes are being read"
            raise ApiError(429, "overloaded", message, headers={**retry_after(), "Connection": "close"})
        self._held[held.tenant] += num_bytes
        held.num_bytes += num_bytes


class ValueRoom:
    """Memory of the JSON values that bodies are read to, until they are jobs: many times that of the bodies. Who does
    not fit waits until those before it are done; one that would never fit goes alone."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        """Estimated bytes taken now."""
        self._turn = asyncio.Lock()
        self._has_left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold so many bytes within the block, once they are free."""
        async with self._turn:  # who came first goes first
            while self.num_bytes and self.num_bytes + num_bytes > self._most_bytes:
                self._has_left.clear()
                await self._has_left.wait()
            self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            self._has_left.set()
