"""Rows of the executor: who holds which, and what the next plan must open and close."""

from deltaserve.control.sched.plan import RowOpen
from deltaserve.control.sched.request import Request
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId


class Rows:
    """Hands out `num_rows` rows. A row taken and given back before a plan was made is never told to the executor."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = [RowId(row) for row in reversed(range(num_rows))]
        self._opens: list[Request] = []
        self._closes: list[RowId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_news(self) -> bool:
        """Whether the executor must be told to close rows."""
        return bool(self._closes)

    def take(self, request: Request) -> None:
        request.row = self._free.pop()
        request.tabled.clear()
        self._opens.append(request)

    def give_back(self, request: Request) -> None:
        """Having no row is fine."""
        row = request.row
        if row is None:
            return
        if request in self._opens:
            self._opens.remove(request)
        else:
            self._closes.append(row)
        self._free.append(row)
        request.row = None

    def take_opens(self) -> tuple[RowOpen, ...]:
        opens, self._opens = self._opens, []
        return tuple(_open(request) for request in opens)

    def take_closes(self) -> tuple[RowId, ...]:
        closes, self._closes = self._closes, []
        return tuple(closes)


def _open(request: Request) -> RowOpen:
    if request.row is None:
        raise StateError("a request to be opened has no row")
    start, request.draft_start = request.draft_start, None  # known of its present pages alone
    return RowOpen(request.row, request.sampling, bytes(request.tokens), request.prompt_len, start)
