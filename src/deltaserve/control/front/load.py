"""What workers report about their load, made comparable: one number per worker and question, stale ones faded.

A report is trusted for `stale_after_s`; after that it fades to the mean of its kind with a half-life of one second, so
that neither an old bad report starves a worker nor an old good one floods it. A worker that has not measured a rate
yet is taken to be as quick as the quickest of its kind: taken for slower, it would never be tried. So is one whose rate
was measured long ago, while another's is new: what made it slow then may be over, and only work would show it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Status

_HALF_LIFE_S = 1.0
_OLD_S = 10.0
"""A rate that was not measured anew for so long says little of now."""


@dataclass(slots=True)
class Unseen:
    """What this front put on a worker since its last report, less what ended since. The report is of all fronts."""

    rooms: int = 0
    compute_tokens: int = 0
    """Prompt tokens to compute."""
    memory_tokens: int = 0
    """Tokens of memory asked for; below zero: more was given back."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What is known of one worker at one moment: its own words, and what this front put there."""

    worker: PeerName
    status: Status | None
    age_s: float
    pool_tokens: int
    """Tokens of the pool that keeps every page; 0: not told."""
    max_running: int
    own_tokens: int
    """Tokens to compute of this front's rooms there that have no first token yet."""
    own_rooms: int
    own_output_tokens: int
    """What those rooms are expected to produce in all."""
    unseen: Unseen
    group: str | None = None
    """Name of its expert group: see Member."""
    rate_age_s: float = 0.0
    """How long ago the rate of prompt tokens in `status` was measured."""
    step_age_s: float = 0.0
    """The same of the time of a step."""
    way_age_s: float = 0.0
    """The same of what hand-overs to it take."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Numbers used for a worker while nobody reported better ones."""

    prefill_tokens_per_s: float
    decode_step_s: float
    output_len: int
    """Tokens that a running request produces in all."""
    stale_after_s: float


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Load of the prefill side of a worker."""

    worker: PeerName
    queue_tokens: float
    tokens_per_s: float
    """Prompt tokens it computes per second, > 0."""
    is_measured: bool = True
    """Whether any worker of its kind measured the rate; else it is assumed."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Load of the decode side of a worker. Tokens are tokens of KV memory."""

    worker: PeerName
    num_rooms: float
    """Rooms running and waiting."""
    max_running: int
    waiting_tokens: float
    free_tokens: float
    """Tokens of memory that are free or evictable."""
    pool_tokens: int
    step_s: float
    output_len: float
    """Tokens that one of its rooms produces in all, on average."""
    is_measured: bool = True
    """Whether any worker of its kind measured `step_s`; else it is assumed."""
    handover_s: float | None = None
    """Seconds of a prompt's hand-over to it, besides its bytes. None: no worker of its kind measured that."""
    byte_s: float | None = None
    """Seconds of each byte of it, likewise."""
    is_in_group: bool = False
    """Whether it is in an expert group: its steps take as long as those of others, with fewer rooms too."""


def prefill_loads(reports: Sequence[LoadReport], assumed: Assumed) -> list[PrefillLoad]:
    """Load of each prefill side, in the order of `reports`."""
    stale = assumed.stale_after_s
    queues = smooth(reports, lambda s: float(s.waiting_tokens), 0.0, stale)
    told = _without_old([(_rate(report), report.rate_age_s) for report in reports])
    rates = _smoothed(reports, told, assumed.prefill_tokens_per_s, stale, max)
    is_measured = any(map(_rate, reports))
    return [
        PrefillLoad(
            report.worker, max(queue + report.unseen.compute_tokens, float(report.own_tokens)), rate, is_measured
        )
        for report, queue, rate in zip(reports, queues, rates, strict=True)
    ]


def decode_loads(reports: Sequence[LoadReport], assumed: Assumed) -> list[DecodeLoad]:
    """Load of each decode side, in the order of `reports`."""
    stale = assumed.stale_after_s
    rooms = smooth(reports, lambda s: float(s.num_running + s.num_waiting), 0.0, stale)
    waiting = smooth(reports, lambda s: float(s.waiting_tokens), 0.0, stale)
    free = smooth(reports, _free_fraction, 1.0, stale)
    told = _without_old([(_step_s(report), report.step_age_s) for report in reports])
    steps = _of_groups(reports, _smoothed(reports, told, assumed.decode_step_s, stale, min))
    is_measured = any(map(_step_s, reports))
    handovers, of_byte = _ways(reports, lambda s: s.handover_s, stale), _ways(reports, lambda s: s.byte_s, stale)
    out: list[DecodeLoad] = []
    for i, report in enumerate(reports):
        num_rooms = max(rooms[i] + report.unseen.rooms, float(report.own_rooms))
        owed = waiting[i] + report.unseen.memory_tokens
        out.append(
            DecodeLoad(
                worker=report.worker,
                num_rooms=num_rooms,
                max_running=report.max_running,
                waiting_tokens=max(0.0, owed),
                free_tokens=min(float(report.pool_tokens), free[i] * report.pool_tokens + max(0.0, -owed)),
                pool_tokens=report.pool_tokens,
                step_s=steps[i],
                output_len=_output_len(report, num_rooms, assumed.output_len),
                is_measured=is_measured,
                handover_s=handovers[i],
                byte_s=of_byte[i],
                is_in_group=report.group is not None,
            )
        )
    return out


def _ways(
    reports: Sequence[LoadReport], pick: Callable[[Status], float | None], stale_after_s: float
) -> list[float | None]:
    """What hand-overs to each worker take: where it measured nothing lately, as to the quickest; None if nobody did."""
    values = [None if report.status is None else pick(report.status) for report in reports]
    told = _without_old([(value, report.way_age_s) for value, report in zip(values, reports, strict=True)])
    if all(value is None for value in told):
        return told
    return [*_smoothed(reports, told, 0.0, stale_after_s, min)]


def _of_groups(reports: Sequence[LoadReport], values: Sequence[float]) -> list[float]:
    """Each worker's value; for workers in a group the mean of its members, since only noise differs."""
    own = [report.group or report.worker for report in reports]
    found: dict[str, list[float]] = {}
    for name, value in zip(own, values, strict=True):
        found.setdefault(name, []).append(value)
    return [sum(found[name]) / len(found[name]) for name in own]


def _output_len(report: LoadReport, num_rooms: float, assumed_len: int) -> float:
    """Mean output length of a room: what this front's rooms asked for is known, those of others are assumed."""
    if not num_rooms:
        return float(assumed_len)
    return (report.own_output_tokens + (num_rooms - report.own_rooms) * assumed_len) / num_rooms


def smooth(
    reports: Sequence[LoadReport], pick: Callable[[Status], float | None], default: float, stale_after_s: float
) -> list[float]:
    """One number per report: `pick` of its status, faded to the mean by age; the mean where `pick` answers None.

    The mean is that of reports that are not stale, else of all there are, else `default`.
    """
    values = [None if report.status is None else pick(report.status) for report in reports]
    return _smoothed(reports, values, default, stale_after_s, fmean)


def _smoothed(
    reports: Sequence[LoadReport],
    values: Sequence[float | None],
    default: float,
    stale_after_s: float,
    of_untried: Callable[[Sequence[float]], float],
) -> list[float]:
    """One number per report: its value, faded to the mean by age; without one, what `of_untried` makes of others."""
    known = [(value, report.age_s) for value, report in zip(values, reports, strict=True) if value is not None]
    fresh = [value for value, age in known if age <= stale_after_s]
    basis = fresh or [value for value, _ in known] or [default]
    mean, untried = fmean(basis), of_untried(basis)
    return [
        untried if value is None else _fade(value, mean, report.age_s - stale_after_s)
        for value, report in zip(values, reports, strict=True)
    ]


def _without_old(told: Sequence[tuple[float | None, float]]) -> list[float | None]:
    """Measured values, each with its age in seconds: without the old ones, unless all are old."""
    is_any_new = any(value is not None and age_s <= _OLD_S for value, age_s in told)
    return [None if is_any_new and age_s > _OLD_S else value for value, age_s in told]


def _rate(report: LoadReport) -> float | None:
    return None if report.status is None else report.status.prefill_tokens_per_s or None


def _step_s(report: LoadReport) -> float | None:
    return None if report.status is None else report.status.decode_step_s or None


def _fade(value: float, mean: float, overdue_s: float) -> float:
    weight = 1.0 if overdue_s <= 0 else 0.5 ** (overdue_s / _HALF_LIFE_S)
    return weight * value + (1.0 - weight) * mean


def _free_fraction(status: Status) -> float | None:
    """Free or evictable part of the fullest pool; None when the worker reports no pools."""
    pools = zip(status.free_pages, status.evictable_pages, status.num_pages, strict=False)
    return min(((free + evictable) / total for free, evictable, total in pools if total), default=None)
