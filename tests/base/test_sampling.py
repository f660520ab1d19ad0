"""Sampling parameters as data: complete, frozen, strict on the wire."""

import msgspec
import pytest

from deltaserve.base.sampling import SamplingParams, TokenLogprobs


def test_history_is_needed_by_penalties_only() -> None:
    plain = SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.9, top_k=5, logit_bias=((1, 2.0),))
    assert not plain.needs_history
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert msgspec.structs.replace(plain, **{field: 0.5}).needs_history


def test_is_frozen() -> None:
    params = SamplingParams(max_tokens=1, seed=0)
    with pytest.raises(AttributeError):
        params.max_tokens = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": "8"},
        {"max_tokens": 1.5},
        {"seed": None},
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"logit_bias": [[1, 2.0, 3.0]]},
        {"stop_token_ids": ["</s>"]},
        {"beam_width": 4},
    ],
)
def test_wrong_types_and_unknown_fields_are_refused(change: dict[str, object]) -> None:
    packed = msgspec.msgpack.encode({"max_tokens": 8, "seed": 1} | change)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=SamplingParams)


def test_a_seed_has_64_unsigned_bits() -> None:
    params = SamplingParams(max_tokens=1, seed=2**64 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_logprobs_travel_as_arrays() -> None:
    value = TokenLogprobs(-0.5, ((7, -0.5), (9, -1.25)))
    packed = msgspec.msgpack.encode(value)
    assert msgspec.msgpack.decode(packed) == [-0.5, [[7, -0.5], [9, -1.25]]]
    assert msgspec.msgpack.decode(packed, type=TokenLogprobs) == value
