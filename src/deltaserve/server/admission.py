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
_PLACES_PER_FREE_ONE = 4
"""A tenant may have so many places for each one that is free: alone 4/5 of all, two that flood us 4/9 each, and so on.
Whoever comes next always finds room."""


def exceeds_share(settings: ServerSettings, mine: int, free: int) -> bool:
    """Whether one tenant of several has as much as it may have while so much is free for all."""
    return settings.num_tenants > 1 and mine >= _PLACES_PER_FREE_ONE * free


@dataclass(eq=False, slots=True)
class Admitted:
    """One request's place. Given back exactly once."""

    tenant: Namespace
    num_samples: int = 1
    num_tokens: int = 0
    is_open: bool = True


@dataclass(slots=True)
class Admission:
    """Counts samples and tokens inside, samples per tenant as well. Nobody waits here: full means 429 now."""

    settings: ServerSettings
    num_requests: int = 0
    num_tokens: int = 0
    _samples: Counter[Namespace] = field(default_factory=Counter)

    @property
    def num_samples(self) -> int:
        """Samples inside; a request counts as one until it is read."""
        return self._samples.total()

    def enter(self, tenant: Namespace) -> Admitted:
        """Take a place before the body is parsed; its fair share, where there are several. Raises ApiError 429."""
        num_free = self.settings.max_queue - self.num_samples
        if num_free <= 0:
            raise self._full(f"{self.num_samples} of {self.settings.max_queue} places are taken")
        if exceeds_share(self.settings, self._samples[tenant], num_free):
            message = f"this key has {self._samples[tenant]} places and {num_free} are left for all"
            raise ApiError(429, "rate_limited", message, headers=retry_after())
        self._samples[tenant] += 1
        self.num_requests += 1
        return Admitted(tenant)

    def book(self, place: Admitted, num_samples: int, num_tokens: int) -> None:
        """Add what the request may cost, once it is known. Raises ApiError 429. A request alone always fits."""
        if self.num_requests > 1:
            most = self.settings.max_queue
            if self.num_samples + num_samples - place.num_samples > most:
                raise self._full(f"{self.num_samples} of {most} places are taken, {num_samples} are needed")
            if self.num_tokens + num_tokens > self.settings.max_queue_tokens:
                raise self._full(f"{self.num_tokens} of {self.settings.max_queue_tokens} tokens are taken")
        self._samples[place.tenant] += num_samples - place.num_samples
        self.num_tokens += num_tokens
        place.num_samples, place.num_tokens = num_samples, num_tokens

    def leave(self, place: Admitted) -> None:
        """Give the place back. Raises StateError the second time."""
        if not place.is_open:
            raise StateError("a place in the queue was given back twice")
        place.is_open = False
        self.num_requests -= 1
        self.num_tokens -= place.num_tokens
        self._samples[place.tenant] -= place.num_samples
        if not self._samples[place.tenant]:
            del self._samples[place.tenant]

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
            found["draining"] = "the server is draining: it takes no new requests"
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
