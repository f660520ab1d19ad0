"""How many requests may be inside at a time, and whether any may come in at all."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deltaserve.base.errors import StateError
from deltaserve.base.ids import Namespace
from deltaserve.server.errors import ApiError, not_ready, retry_after
from deltaserve.server.settings import ServerSettings

MAX_INTERNAL_ERRORS = 3
INTERNAL_ERROR_WINDOW_S = 60.0


@dataclass(eq=False, slots=True)
class Admitted:
    """One request's place. Given back exactly once."""

    tenant: Namespace
    num_tokens: int = 0
    is_open: bool = True


@dataclass(slots=True)
class Admission:
    """Counts requests and tokens inside, per tenant as well. Nobody waits here: full means 429 now."""

    settings: ServerSettings
    num_tokens: int = 0
    _per_tenant: Counter[Namespace] = field(default_factory=Counter)

    @property
    def num_requests(self) -> int:
        """Requests inside."""
        return self._per_tenant.total()

    def enter(self, tenant: Namespace) -> Admitted:
        """Take a place before the body is parsed. Raises ApiError 429."""
        share = self.settings.max_queue_per_tenant
        if self.num_requests >= self.settings.max_queue:
            raise self._full(f"{self.settings.max_queue} requests are in the server")
        if share is not None and self._per_tenant[tenant] >= share:
            raise ApiError(429, "rate_limited", f"this key has {share} requests in the server", headers=retry_after())
        self._per_tenant[tenant] += 1
        return Admitted(tenant)

    def book(self, place: Admitted, num_tokens: int) -> None:
        """Add what the request may cost, once it is known. Raises ApiError 429. A request alone always fits."""
        most = self.settings.max_queue_tokens
        if self.num_tokens and self.num_tokens + num_tokens > most:
            raise self._full(f"{self.num_tokens} of {most} tokens are taken")
        place.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def leave(self, place: Admitted) -> None:
        """Give the place back. Raises StateError the second time."""
        if not place.is_open:
            raise StateError("a place in the queue was given back twice")
        place.is_open = False
        self.num_tokens -= place.num_tokens
        self._per_tenant[place.tenant] -= 1
        if not self._per_tenant[place.tenant]:
            del self._per_tenant[place.tenant]

    @staticmethod
    def _full(why: str) -> ApiError:
        return ApiError(429, "overloaded", f"the server is full: {why}", headers=retry_after())


@dataclass(slots=True)
class Health:
    """Whether this front should get new requests."""

    engine_ready: Callable[[], str | None]
    now: Callable[[], float]
    draining: bool = False
    _internal_errors: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_INTERNAL_ERRORS + 1))

    def internal_error(self) -> None:
        """A request met a bug of ours."""
        self._internal_errors.append(self.now())

    def reasons(self) -> dict[str, str]:
        """Why not to send requests here, by source; empty when ready."""
        found: dict[str, str] = {}
        if self.draining:
            found["draining"] = "the server is shutting down"
        engine = self.engine_ready()
        if engine is not None:
            found["engine"] = engine
        recent = [at for at in self._internal_errors if at > self.now() - INTERNAL_ERROR_WINDOW_S]
        if len(recent) > MAX_INTERNAL_ERRORS:
            found["internal_errors"] = f"more than {MAX_INTERNAL_ERRORS} internal errors in a minute"
        return found

    def check(self) -> None:
        """Raises ApiError 503 unless ready."""
        reasons = self.reasons()
        if reasons:
            raise not_ready("; ".join(reasons.values()))
