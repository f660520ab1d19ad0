"""How quickly prompts are computed here, as lately taught by steps that computed some."""

from deltaserve.control.engine.near import ASSUMED_PACE, PromptPace
from deltaserve.control.sched.running import Running

_OLD_S = 10.0
"""What was measured longer ago says little of now: what made steps slow then may be over, and where prompts are kept
away for it nothing else would show that."""

_DIGITS = 3
"""Decimal places of a pace: more are noise, and it is told."""


class OwnPace:
    """The pace of one worker's prompts, against that of prefill."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._extended_at: float | None = None

    def extended(self, now: float) -> None:
        """A step has computed some of a prompt."""
        self._extended_at = now

    def pace(self, prefill_tokens_per_s: float | None, num_rows: int, now: float) -> PromptPace:
        """The pace beside so many rows that decode. `prefill_tokens_per_s`: None where it was not measured."""
        target, config = self._running.step_target, self._running.config
        most = min(config.step_len, config.near_len)
        token_s, alone_s = target.further_s, target.share_s(0, most, most)
        beside_s = target.share_s(num_rows, most, min(most, config.page_size))
        is_old = self._extended_at is None or now - self._extended_at > _OLD_S
        if is_old or prefill_tokens_per_s is None or token_s is None or alone_s is None or beside_s is None:
            return ASSUMED_PACE
        rate = prefill_tokens_per_s
        told = (rate * seconds for seconds in (alone_s, max(alone_s, beside_s), token_s))
        alone, beside, of_row = (round(pace, _DIGITS) for pace in told)
        return PromptPace(alone=alone, beside=beside, of_row=of_row)
