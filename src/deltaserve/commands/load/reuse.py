"""What of the prompts was computed, and where the rest was found: from the `timings` that a deltaserve server tells.

A prompt that decode computes itself is moved by nobody: what it found is decode's. Any other one is computed by prefill
as far as prefill lacks it, whatever decode holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from deltaserve.commands.load.moved_bytes import MovedBytes
from deltaserve.commands.load.record import RequestRecord

_LOADED = ("decode_loaded_tokens", "prefill_loaded_tokens")
_MOST_LOST = 0.1
"""Share of a known prefix that may be computed again before it counts as evicted: pages are whole, tokens are not."""


@dataclass(frozen=True, slots=True)
class MeanWaits:
    """Means over the prompts of which it was a question who computes them, in tokens of prefill's pace."""

    local_len: float
    """What computing one on decode was taken to cost."""
    prefill_len: float
    """What prefill was taken to do until one is handed over, by the better of its ways."""

    def as_texts(self) -> tuple[str, str]:
        return f"{self.local_len:,.0f}", f"{self.prefill_len:,.0f}"


@dataclass(frozen=True, slots=True)
class ReuseSummary:
    """Figures of completed requests whose server told timings."""

    num_requests: int
    num_prefilled: int
    """Prompts among these that a prefill worker computed."""
    prompt_len: int
    """Tokens, likewise the following lengths."""
    new_len: int
    """What no earlier request of the run said or was answered."""
    computed_len: int
    """Prompt tokens that the worker computed which computed the prompt."""
    decode_cached_len: int
    prefill_cached_len: int
    loaded_len: int
    """What of these two came from files under the caches."""
    pulled_len: int
    """What of `prefill_cached_len` prefill pulled from decode for a prompt."""
    delta_len: int
    """Prompt tokens that decode lacked of the prompts that prefill computed."""
    moved_bytes: int
    """Pages and states, from prefill to decode."""
    num_evicted: int
    """Later turns of which neither side held what was known, but for a tenth."""
    waits: "MeanWaits | None"
    """What the rule compared; None: it was no question for any prompt."""
    counted: MovedBytes | None = None
    """What the workers counted meanwhile; None: it is not known."""

    @property
    def computed_over_new(self) -> float | None:
        return self.computed_len / self.new_len if self.new_len else None

    @property
    def moved_over_delta(self) -> float | None:
        """Bytes moved over those of the delta's pages, as decode asked for them; more where frames weigh, less where
        transfers failed. None: nothing was asked for, or it is not known."""
        return self.moved_bytes / self.counted.granted if self.counted and self.counted.granted else None

    @property
    def share_by_decode(self) -> float:
        """Prompts that no prefill worker computed."""
        return 1 - self.num_prefilled / self.num_requests

    @property
    def share_computed(self) -> float:
        """Prompt tokens that no cache held."""
        return self.computed_len / self.prompt_len if self.prompt_len else 0.0

    @property
    def share_loaded(self) -> float:
        """Prompt tokens that came from a file under a cache, on whichever side."""
        return self.loaded_len / self.prompt_len if self.prompt_len else 0.0

    @property
    def share_pulled(self) -> float:
        """Prompt tokens that prefill pulled from decode."""
        return self.pulled_len / self.prompt_len if self.prompt_len else 0.0

    def as_rows(self) -> Iterable[tuple[str, str]]:
        """Label and value of each figure, for people."""
        yield "prompts by prefill", f"{self.num_prefilled:,} of {self.num_requests:,}"
        yield "prompt tokens new", f"{self.new_len:,} of {self.prompt_len:,}"
        ratio = self.computed_over_new
        yield "prompt tokens computed", f"{self.computed_len:,}" + ("" if ratio is None else f" ({ratio:.2f} of new)")
        yield "found by decode, by prefill", f"{self.decode_cached_len:,}, {self.prefill_cached_len:,}"
        if self.loaded_len:
            yield "of that from files", f"{self.loaded_len:,}"
        if self.pulled_len:
            yield "of that pulled from decode", f"{self.pulled_len:,}"
        yield "tokens of the delta", f"{self.delta_len:,}"
        yield "bytes moved", f"{self.moved_bytes:,}"
        if self.moved_over_delta is not None:
            yield "bytes moved over bytes of the delta", f"{self.moved_over_delta:.4f}"
        if self.moved_bytes and self.delta_len:
            yield "bytes moved for each token of the delta", f"{self.moved_bytes / self.delta_len:,.1f}"
        if self.counted is not None:
            yield "bytes back to prefill", f"{self.counted.back:,}"
        yield "turns whose prefix was lost", f"{self.num_evicted:,}"
        if self.waits is not None:
            yield "tokens waited for, mean: by decode, by prefill", ", ".join(self.waits.as_texts())


def reuse_of(records: Sequence[RequestRecord], counted: MovedBytes | None = None) -> ReuseSummary | None:
    """None: no completed request has timings."""
    told = [(record, record.timings[0]) for record in records if record.error is None and record.timings]
    if not told:
        return None
    prefilled = [(record, timing) for record, timing in told if timing["transferred_bytes"]]
    return ReuseSummary(
        num_requests=len(told),
        num_prefilled=len(prefilled),
        prompt_len=sum(record.prompt_len for record, _ in told),
        new_len=sum(record.prompt_len - record.known_len for record, _ in told),
        computed_len=sum(record.prompt_len - _found(timing) for record, timing in told),
        decode_cached_len=sum(timing["decode_cached_tokens"] for _, timing in told),
        prefill_cached_len=sum(timing["prefill_cached_tokens"] for _, timing in told),
        loaded_len=sum(timing.get(side, 0) for _, timing in told for side in _LOADED),
        delta_len=sum(record.prompt_len - timing["decode_cached_tokens"] for record, timing in prefilled),
        moved_bytes=sum(timing["transferred_bytes"] for _, timing in told),
        num_evicted=sum(_is_lost(record, timing) for record, timing in told if record.turn),
        pulled_len=sum(timing.get("prefill_pulled_tokens", 0) for _, timing in told),
        waits=_waits_of([timing for _, timing in told if timing.get("computed_on") is not None]),
        counted=counted,
    )


def _waits_of(weighed: Sequence[Mapping[str, int]]) -> MeanWaits | None:
    """None: no prompt was weighed."""
    if not weighed:
        return None
    by_prefill = [min(timing["prefill_wait_tokens"], _pull_wait(timing)) for timing in weighed]
    return MeanWaits(fmean(timing["local_wait_tokens"] for timing in weighed), fmean(by_prefill))


def _pull_wait(timing: Mapping[str, int]) -> int:
    """What prefill would do behind a pull; where there was nothing to pull, without one."""
    return timing.get("pull_wait_tokens", 0) or timing["prefill_wait_tokens"]


def _found(timing: Mapping[str, int]) -> int:
    """Tokens that the worker which computed the prompt found in its cache."""
    return timing["prefill_cached_tokens" if timing["transferred_bytes"] else "decode_cached_tokens"]


def _is_lost(record: RequestRecord, timing: Mapping[str, int]) -> bool:
    found = max(timing["decode_cached_tokens"], timing["prefill_cached_tokens"])
    return found < record.known_len * (1 - _MOST_LOST)
