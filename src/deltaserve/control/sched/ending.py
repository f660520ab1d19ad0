"""When an output is complete: one rule for decode, which generates it, and for the front, which may know it first."""

from deltaserve.core.sampling import SamplingParams
from deltaserve.core.wire.messages import FinishReason


def finish_of(sampling: SamplingParams, output_len: int, last_token: int) -> FinishReason | None:
    """Why an output of `output_len` tokens ends with its last one; None: it goes on."""
    if last_token in sampling.stop_token_ids and (output_len > sampling.min_tokens or sampling.grammar is not None):
        return FinishReason.STOP  # before `min_tokens` one is drawn only where a grammar leaves nothing else
    if output_len >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
