"""How long steps may take: how many rows decode at once, and how many tokens of prompts are computed beside them.

With a target (`--itl-target-ms`) rows are admitted while the step is expected to stay within it, and prompts share a
step with rows that decode only as far as it lets them. Nobody is taken out of the batch: contexts that grow lengthen
the step, and then the batch shrinks as requests end. One row always runs, and a prompt computes at least a page in
every step.
"""

from deltaserve.control.sched.recent import Recent
from deltaserve.control.sched.step_cost import StepCost

_TELLING_LEN = 16
"""Fewer tokens of prompts tell nothing of one: a step's time varies by more than they add."""


class StepTarget:
    """How long steps of one engine may take, in seconds."""

    def __init__(self, target_s: float | None) -> None:
        """None: steps take as long as they take."""
        self.target_s = target_s
        self.cost = StepCost()
        self._of_prompt_token = Recent(enough=1)
        self._of_further_token = Recent(enough=4)

    def aim_at(self, target_s: float | None) -> None:
        self.target_s = target_s

    @property
    def extend_s(self) -> float | None:
        """Seconds of one token of a prompt, as half of the last steps with prompts took at most. None: not known
        yet."""
        return self._of_prompt_token.quick(0.5)

    @property
    def further_s(self) -> float | None:
        """Seconds that one more token of a prompt adds to a step, as half of the last steps with prompts took at most.
        None: not known yet."""
        return self._of_further_token.quick(0.5)

    def share_s(self, num_decoding: int, most: int, least: int) -> float | None:
        """Seconds of one token of a long prompt beside so many decode rows: what it adds to a step, and its share of
        what the step takes without prompts. None: not known yet."""
        token_s, of_rows = self.further_s, self.cost.seconds(num_decoding)
        if token_s is None or of_rows is None:
            return None
        return token_s + of_rows / max(1, self.extend_len(num_decoding, most, least))

    def learn(self, decoded: int, extended: int, seconds: float) -> None:
        """What a step took in which so many tokens were decoded and so many of prompts computed."""
        if seconds <= 0 or not (decoded or extended):
            return
        if extended >= _TELLING_LEN and self.cost.price is not None:
            self._of_further_token.add(max(0.0, seconds - (self.cost.seconds(decoded) or 0.0)) / extended)
        of_prompts = (self.extend_s or 0.0) * extended
        if not extended:
            self.cost.learn(decoded, seconds)
        elif not decoded:
            self._of_prompt_token.add(seconds / extended)
        elif 0.0 < of_prompts < seconds / 2:
            self.cost.learn(decoded, seconds - of_prompts)
        elif (of_rows := self.cost.seconds(decoded)) is not None:
            self._of_prompt_token.add(max(0.0, seconds - of_rows) / extended)

    def most_rows(self, most: int) -> int:
        """How many requests may run, of at most `most`."""
        fitting = None if self.target_s is None else self.cost.fitting(self.target_s)
        return most if fitting is None else max(1, min(most, fitting))

    def extend_len(self, num_decoding: int, most: int, least: int) -> int:
        """Tokens of prompts in a step that has so many decode rows: from `least` to `most`."""
        if self.target_s is None or not num_decoding:
            return most
        of_rows, per_token = self.cost.seconds(num_decoding), self.extend_s
        if of_rows is None or per_token is None:
            return least if per_token is None else most
        if per_token <= 0.0:
            return most
        return min(most, max(least, int((self.target_s - of_rows) / per_token)))
