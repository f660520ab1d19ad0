"""How much memory the bodies may take that are being read: a client that never finishes its body keeps what it sent."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deltaserve.base.ids import Namespace
from deltaserve.server.admission import exceeds_share
from deltaserve.server.errors import ApiError, retry_after
from deltaserve.server.settings import ServerSettings


@dataclass(slots=True)
class Held:
    """Bytes of one body."""

    tenant: Namespace
    num_bytes: int = 0


@dataclass(slots=True)
class Bodies:
    """Bytes of all bodies that are read and parsed now. Nobody waits here: full means 429 now."""

    settings: ServerSettings
    _held: Counter[Namespace] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    @contextmanager
    def one(self, tenant: Namespace) -> Iterator[Held]:
        """A body, from its first byte until it is parsed."""
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
        if num_bytes > free or exceeds_share(self.settings, self._held[held.tenant], free):
            message = f"the server is full: bodies of {self.num_bytes} bytes are being read"
            raise ApiError(429, "overloaded", message, headers={**retry_after(), "Connection": "close"})
        self._held[held.tenant] += num_bytes
        held.num_bytes += num_bytes
