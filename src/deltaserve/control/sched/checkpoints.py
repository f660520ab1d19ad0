"""Where a recurrent state is kept in the tree. The one place that says it.

KV stays of every full page. A state is as large as the KV of hundreds of tokens or more, and reuse ends at the last one
that is there, so few are kept of each path, where somebody is likely to go on:

    fork      the last grid point of what a match found of KV, beyond the last state: others have come as far before
    shared    the last grid point that a waiting request has in common with one that computes: it is cut there
    prompt    the last grid point before a prompt's last token, which an equal prompt has to compute
    output    the last grid point that decoding has passed, in place of the one before: the next turn goes on there
    interval  every so many tokens, if asked for

Everywhere else a request's own slot is written over in place. The grid is absolute: a recurrent layer computes whole
pieces of it, so what is cut there has equal bits however a prompt was cut elsewhere. That is Marconi's rule of
admission (arXiv 2411.19379: forks and ends, at most a few per sequence) with the prompt's end added; one that kept a
state at every chunk's end was up to 17 times slower to the first token (SGLang #11214, #27220).

Slots: a running request writes one. A second one holds the checkpoint that it begins from (leased until its first step
is over), later the one it left last (evictable: it goes first when slots are short, and none is left where there is no
other slot to go on in). So one slot for each running request is enough. Two, by which memory is shared out
(`Retention.most_pages`), let all of them keep their checkpoints.
"""

from deltaserve.control.sched.request import Request


class Checkpoints:
    """The grid, and what is kept of it."""

    def __init__(self, grid_len: int, interval_len: int | None = None) -> None:
        """`interval_len` is rounded up to whole pieces of the grid."""
        self._grid_len = grid_len
        self._interval_len = None if interval_len is None else -(-interval_len // grid_len) * grid_len

    def last(self, num_tokens: int) -> int:
        """The last grid point that is reached with `num_tokens`."""
        return num_tokens // self._grid_len * self._grid_len

    def fork(self, cached_len: int, kv_len: int) -> int | None:
        """Where to keep a state when KV is there further than where a request can go on."""
        point = self.last(kv_len)
        return point if point > cached_len else None

    def next_point(self, request: Request) -> int:
        """The next grid point behind what is computed."""
        return self.last(request.num_computed) + self._grid_len

    def next_stop(self, request: Request) -> int | None:
        """The next position at which a chunk must end, because its state is kept."""
        computed, known = request.num_computed, request.num_tokens - 1
        points = [*request.forks, self.last(known)]
        if self._interval_len is not None:
            points.append((computed // self._interval_len + 1) * self._interval_len)
        return min((point for point in points if computed < point <= known), default=None)

    def is_due(self, request: Request) -> bool:
        """Whether the state after what is computed is kept."""
        computed = request.num_computed
        if computed % self._grid_len or computed != request.num_in_state:
            return False
        return computed == self.last(request.num_tokens - 1) or self._is_asked_for(request)

    def is_passing(self, request: Request) -> bool:
        """Whether a checkpoint after what is computed goes when decoding leaves the next one."""
        return request.num_computed == request.num_tokens - 1 and not self._is_asked_for(request)

    def _is_asked_for(self, request: Request) -> bool:
        computed = request.num_computed
        return computed in request.forks or (self._interval_len is not None and computed % self._interval_len == 0)
