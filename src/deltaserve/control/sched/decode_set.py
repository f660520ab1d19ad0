"""The running requests that go on by one token in every step: a step costs nothing for those of which nothing changes.

A request joins when the step before drew a token of it, and leaves when it ends, makes way, or has drawn its last
token. From then on its position is known from the number of steps: its base, and the clock, which counts plans. So it
is known beforehand at which clock it needs a page, and at which it has nothing to compute any more.
"""

from collections.abc import Iterator, KeysView

from deltaserve.control.sched.plan import DecodeRows
from deltaserve.control.sched.request import Request
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.ids import RowId


class DecodeSet:
    """Requests with their rows, in the order in which they joined. All of them are in every plan."""

    def __init__(self, page_size: int) -> None:
        self.clock = 0
        """Plans made so far."""
        self._page_size = page_size
        self._rows: dict[Request, RowId] = {}
        self._bases: dict[Request, int] = {}
        """Position that it computes in the next plan, less that plan's clock."""
        self._due: dict[int, dict[Request, None]] = {}
        """Clock |-> who has no page then for what it computes."""
        self._due_at: dict[Request, int] = {}
        self._ending: dict[int, dict[Request, None]] = {}
        """Clock |-> who has drawn its last token before."""
        self._joined: dict[Request, RowId] = {}
        """Those of which no plan has said that they joined."""
        self._left: list[RowId] = []
        self._told: DecodeRows | None = None
        """As the last plan named them; None: they have changed since, or there are none."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: Request) -> bool:
        return request in self._rows

    def __iter__(self) -> Iterator[Request]:
        return iter(self._rows)

    def members(self) -> KeysView[Request]:
        """The requests as a set."""
        return self._rows.keys()

    # ------------------------------------------------------------ who is in it

    def join(self, request: Request, position: int) -> None:
        """A request that computes this position in the next plan, and the next one in every plan behind it."""
        if request.row is None:
            raise StateError("a running request without a row")
        base = position - self.clock - 1
        self._rows[request] = self._joined[request] = request.row
        self._bases[request] = base
        self._ending.setdefault(request.max_len - 1 - base, {})[request] = None
        self.grown(request)
        self._told = None

    def leave(self, request: Request) -> None:
        """The request is not in the next plan, or not as one of these. It may be none of them."""
        row = self._rows.pop(request, None)
        if row is None:
            return
        if self._joined.pop(request, None) is None:
            self._left.append(row)
        _drop(self._ending, request.max_len - 1 - self._bases.pop(request), request)
        _drop(self._due, self._due_at.pop(request), request)
        self._told = None

    def grown(self, request: Request) -> None:
        """One of these has other pages than before."""
        if (known := self._due_at.get(request)) is not None:
            _drop(self._due, known, request)
        at = request.num_pages * self._page_size - self._bases[request]
        self._due_at[request] = at
        self._due.setdefault(at, {})[request] = None

    # ------------------------------------------------------------ the next plan

    def ended(self) -> list[Request]:
        """Those that have drawn their last token before the next plan, as far as they have been planned."""
        return [*self._ending.get(self.clock + 1, ())]

    def lacking(self) -> list[Request]:
        """Those that have no page for what they compute in the next plan."""
        return [*self._due.get(self.clock + 1, ())]

    def position(self, request: Request) -> int:
        """What one of these computes in the next plan."""
        return self._bases[request] + self.clock + 1

    def ending(self) -> tuple[Request, ...]:
        """Those that draw their last token in the last plan that was made."""
        return tuple(self._ending.get(self.clock + 1, ()))

    def tell(self) -> DecodeRows | None:
        """The rows as a plan names them, which is being made: the clock goes on. None: there are none."""
        self.clock += 1
        if self._told is None and (self._rows or self._left):
            joined, left = tuple(self._joined.values()), tuple(self._left)
            self._told = DecodeRows(tuple(self._rows.values()), tuple(self._bases.values()), joined, left)
            self._joined.clear()
            self._left.clear()
        return self._told if self._rows else None

    # ------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Timers are of members, one of each kind for each. Raises IntegrityError."""
        for timers in (self._due, self._ending):
            timed = [request for of_clock in timers.values() for request in of_clock]
            if len(timed) != len(self._rows) or set(timed) != self._rows.keys():
                raise IntegrityError(f"{len(timed)} timers for {len(self._rows)} decode rows")
        for request, row in self._rows.items():
            if request.row != row:
                raise IntegrityError(f"a decode row is {row}, its request has {request.row}")
            if request.num_pages * self._page_size - self._bases[request] != self._due_at[request]:
                raise IntegrityError(f"a decode row of {request.num_pages} pages expects a page at another position")


def _drop(timers: dict[int, dict[Request, None]], clock: int, request: Request) -> None:
    of_clock = timers[clock]
    del of_clock[request]
    if not of_clock:
        del timers[clock]
