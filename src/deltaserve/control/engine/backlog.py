"""What waits on a worker for anybody: all fronts, or all readers, together. What requests share counts once.

A hundred samples of one prompt take its memory, and its computation, once: counted in full they would make the front
believe in a queue of minutes. Requests are grouped by the key of their last full page (equal keys, equal prompts), and
the groups that begin with the same page are compared with the longest of them, by bisection. So it costs two looks per
request, and for each prompt that begins like another the logarithm of its pages.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from deltaserve.control.sched.request import Request
from deltaserve.core.keys import KEY_BYTES, common_keys, num_keys


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests and tokens that wait on this worker."""

    num_requests: int
    """Requests without a row."""
    num_tokens: int
    """Tokens still to be computed here, or to be given memory."""

    @classmethod
    def of(
        cls,
        requests: Iterable[Request],
        granted: Collection[Request],
        page_size: int,
        may_share: Callable[[Request], bool],
    ) -> "Backlog":
        """`granted`: their memory is set aside already. `may_share`: whether what others have computed is used.

        A running row's next token is no backlog.
        """
        num_requests = num_alone = 0
        by_last: dict[bytes, list[tuple[Request, int]]] = {}
        for request in requests:
            missing = request.missing_len
            if request.row is None:
                num_requests += 1
            elif missing <= 1:
                continue
            if request in granted:
                missing = 0
            if request.keys and may_share(request):
                by_last.setdefault(bytes(request.keys[-KEY_BYTES:]), []).append((request, missing))
            else:
                num_alone += missing
        return cls(num_requests, num_alone + _num_shared(by_last.values(), page_size))


def _num_shared(groups: Iterable[list[tuple[Request, int]]], page_size: int) -> int:
    """Tokens that are missing of requests which may share: common full pages once, what follows them for each."""
    num_tokens = 0
    by_first: dict[bytes, list[tuple[bytearray, int]]] = {}
    for equal in groups:
        keys = equal[0][0].keys
        num_full = num_keys(keys) * page_size
        there = min(num_full, max(request.num_tokens - missing for request, missing in equal))
        num_tokens += sum(min(missing, request.num_tokens - num_full) for request, missing in equal)
        by_first.setdefault(bytes(keys[:KEY_BYTES]), []).append((keys, there))
    for alike in by_first.values():
        num_tokens += _num_in_common(alike, page_size)
    return num_tokens


def _num_in_common(chains: list[tuple[bytearray, int]], page_size: int) -> int:
    """Tokens of full pages that nobody has. `chains`: (keys, tokens that are there); what is like the longest, once."""
    longest, there = max(chains, key=lambda chain: len(chain[0]))
    num_tokens = guess = 0
    for keys, there_too in chains:
        if keys is longest:
            continue
        guess = common_keys(keys, longest, guess)  # most begin like it with the same system prompt
        num_common = guess * page_size
        there = max(there, min(num_common, there_too))
        num_tokens += max(0, num_keys(keys) * page_size - max(num_common, there_too))
    return num_tokens + num_keys(longest) * page_size - there
