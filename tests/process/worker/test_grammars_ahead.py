"""What a loop hears of grammars before their rows draw."""

import pytest

from deltaserve.core.errors import FailReason
from deltaserve.core.sampling import MAX_GRAMMAR_BYTES, SamplingParams
from deltaserve.core.wire.messages import Cancel, Message, Offer, Submit
from deltaserve.process.worker.grammars_ahead import GrammarsAhead


def submit(sampling: SamplingParams) -> Submit:
    fields = {"room": b"r" * 16, "epoch": 1, "prompt": b"\1\0\0\0", "prompt_len": 1, "keys": b"", "namespace": ""}
    return Submit(**fields, sampling=sampling, prefill=None, remaining_ms=1)  # type: ignore[arg-type]


def offer(sampling: SamplingParams) -> Offer:
    fields = {"room": b"r" * 16, "attempt": 1, "prompt": b"\1\0\0\0", "prompt_len": 1, "namespace": ""}
    return Offer(**fields, sampling=sampling, remaining_ms=1)  # type: ignore[arg-type]


def params(grammar: str | None) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=0, grammar=grammar)


@pytest.mark.parametrize(
    ("message", "compiled"),
    [
        (submit(params("a")), ["a"]),
        (offer(params("b")), ["b"]),
        (submit(params(None)), []),
        (offer(params("x" * (MAX_GRAMMAR_BYTES + 1))), []),
        (Cancel(room=b"r" * 16, reason=FailReason.CANCELLED), []),
    ],
)
def test_requests_with_a_grammar_are_compiled_for(message: Message, compiled: list[str]) -> None:
    found: list[str] = []
    GrammarsAhead(found.append).hear(message)
    assert found == compiled
