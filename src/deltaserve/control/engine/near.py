"""Where a prompt is computed: on decode, on prefill, or on prefill behind what that pulls from decode.

The one rule, and all that goes into it.
"""

from dataclasses import dataclass

import msgspec

from deltaserve.core.wire.messages import Cores, PrefillWay, Weighed


@dataclass(frozen=True, slots=True)
class PromptPace:
    """Times of a token of a prompt on decode, over that of one on prefill."""

    alone: float
    beside: float
    """Beside other work of decode."""
    of_row: float
    """What each row that draws tokens waits longer for it."""


ASSUMED_PACE = PromptPace(alone=1.0, beside=2.0, of_row=1.0)
"""While it is not measured: beside others half of each step is theirs."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """All ways of one prompt, in tokens of prefill's pace.

    By prefill it waits for the queue there, for what prefill lacks of it, and for the hand-over; or, where decode holds
    more of it, for those pages on their way to prefill (back_reader.py) in place of computing them. On decode it waits
    for the prompts that are computed there already, and every row that draws tokens waits as long as the prompt takes:
    what they lose counts like what it loses itself, so the sum over all requests decides. Dynamo decides by a fixed
    length instead (its conditional disaggregation).

    What the file under decode's tree has of the prompt is loaded where that is sooner than computing it.

    On shared cores rows wait as long for a prompt that prefill computes. Beside one that decode computes they ride
    along, for about the time of the prompt alone, where steps of their own would each read all weights again. So there
    what is computed decides, and not who waits: decode computes the prompt unless prefill holds so much more of it.
    """

    missing_len: int
    """Tokens of the prompt that decode's tree has no KV of."""
    backlog_len: int
    """Tokens of other prompts that decode has still to compute."""
    num_rows: int
    """Rows of decode that draw tokens meanwhile."""
    way: PrefillWay
    """What is to be done until prefill would hand the prompt over."""
    most_len: int
    """On cores of its own decode computes no more of one prompt itself (--decode-extend-tokens). On shared ones this
    bounds a step that has rows, and no prompt."""
    cores: Cores = Cores.OWN
    filed_len: int = 0
    """Tokens among `missing_len` that the file under decode's tree has. 0: none, or nobody knows what loading takes."""
    load_len: int = 0
    """What loading those takes."""
    pace: PromptPace = ASSUMED_PACE

    @property
    def prefill_wait_len(self) -> int:
        """What prefill computes, or could, until the prompt would be handed over."""
        return self.way.queue_len + self.way.lacking_len + self.way.handover_len

    @property
    def pull_wait_len(self) -> int:
        """`prefill_wait_len` behind a pull; 0: there is nothing to pull, or it cannot be."""
        way = self.way
        return max(1, self.prefill_wait_len - way.pulled_len + way.pull_len) if way.pulled_len else 0

    @property
    def is_loaded(self) -> bool:
        """Whether loading what the file has is sooner than computing it."""
        return self.load_len < self.filed_len * self.pace.alone

    @property
    def to_compute_len(self) -> int:
        """Tokens of the prompt that decode would compute."""
        return self.missing_len - self.filed_len if self.is_loaded else self.missing_len

    @property
    def local_wait_len(self) -> int:
        """What all requests of decode together wait where it computes the prompt; on shared cores what it computes.
        While pages are loaded, only the prompt waits."""
        load_len = self.load_len if self.is_loaded else 0
        if self.cores is Cores.SHARED:
            return self.to_compute_len + load_len
        is_alone = not self.num_rows and not self.backlog_len
        own = self.pace.alone if is_alone else self.pace.beside
        computed_len = self.backlog_len + self.to_compute_len
        return int(computed_len * (own + self.num_rows * self.pace.of_row)) + load_len

    @property
    def is_near(self) -> bool:
        """Whether decode is to compute the prompt."""
        is_short = self.to_compute_len <= self.most_len or self.cores is Cores.SHARED
        return is_short and self.local_wait_len <= self.handed_over_len

    @property
    def handed_over_len(self) -> int:
        """What prefill computes until the prompt would be handed over, by the better of its two ways."""
        return min(self.prefill_wait_len, self.pull_wait_len or self.prefill_wait_len)

    def weighed(self) -> Weighed:
        """What the front is told of it."""
        return Weighed(
            missing_len=self.missing_len,
            filed_len=self.filed_len,
            load_len=self.load_len,
            backlog_len=self.backlog_len,
            num_rows=self.num_rows,
            pace_alone=self.pace.alone,
            pace_beside=self.pace.beside,
            pace_of_row=self.pace.of_row,
            most_len=self.most_len,
            cores=self.cores,
            way=self.way,
            local_wait_len=self.local_wait_len,
            prefill_wait_len=self.prefill_wait_len,
            pull_wait_len=self.pull_wait_len,
            is_near=self.is_near,
        )


def known_better(way: PrefillWay, pullable_len: int, lacking_len: int | None) -> PrefillWay:
    """What a front said of prefill, corrected by what decode knows. `pullable_len`: what prefill may be asked to pull,
    at most. `lacking_len`: what it lacks of a prompt with output, which it computes before others; None: no output."""
    if lacking_len is None:
        return msgspec.structs.replace(way, pulled_len=min(way.pulled_len, pullable_len))
    pulled_len = min(way.pulled_len, pullable_len, lacking_len)
    return msgspec.structs.replace(way, queue_len=0, lacking_len=lacking_len, pulled_len=pulled_len)
