"""Where the time of requests went, a line each: `.` waits, `P` prefill, `m` of that while pages move, `D` decode.

A prompt that decode computes itself has no prefill time of its own: what is behind its wait is drawn as prefill.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deltaserve.commands.top.screen import number, seconds
from deltaserve.core.sizes import size

_BAR_LEN = 48
_MOST_LINES = 20


def request_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """`content`: what /admin/requests answers."""
    lines = [*reversed(content["running"]), *content["recent"]][:_MOST_LINES]
    longest = max(map(_length, lines), default=0.0)
    yield f"requests, latest first: . waits, P prefill, m of that while pages move, D decode; 0 to {seconds(longest)}"
    for line in lines:
        yield _line(line, longest)


def _length(line: Mapping[str, Any]) -> float:
    """Time from its arrival to its end, or until now."""
    return float(line.get("e2e_s", line.get("age_s", 0.0)))


def _line(line: Mapping[str, Any], longest: float) -> str:
    samples: Sequence[Mapping[str, Any]] = line["samples"]

    def total(name: str) -> int:
        return sum(int(sample.get(name, 0)) for sample in samples)

    about = (
        f"{line['id'][-12:]:<12} {line.get('outcome', 'running'):<12} prompt {number(total('prompt_tokens')):>5}, on "
        f"decode {number(total('decode_cached_tokens')):>5}, moved {size(total('transferred_bytes')):>8}, answer "
        f"{number(total('output_tokens')):>5}"
    )
    bar = _bar(samples[0] if samples else {}, _length(line), longest)
    return f"{about}  |{bar:<{_BAR_LEN}}| {seconds(_length(line))}"


def _bar(sample: Mapping[str, Any], length: float, longest: float) -> str:
    """One cell for each part of `longest`, of what the sample did there; what is there at all is seen."""
    queue, prefill, moves = (float(sample.get(name, 0.0)) for name in ("queue_s", "prefill_s", "transfer_s"))
    begins, waits = queue + prefill, float(sample.get("decode_queue_s", 0.0))
    first = max(begins, float(sample.get("first_token_s", length)))
    ends = [(".", queue), ("P", begins - moves), ("m", begins), (".", first), ("D", length)]
    if not prefill and "first_token_s" in sample:
        ends = [(".", max(queue, waits)), ("P", first), ("D", length)]
    bar, cell = "", max(longest, 1e-9) / _BAR_LEN
    for letter, end in ends:
        reached = round(min(end, length) / cell)
        bar += letter * max(0, reached - len(bar))
    return bar[:_BAR_LEN]
