"""Sampling parameters as data: complete, frozen, strict on the wire."""

import msgspec
import pytest

from deltaserve.core.sampling import MAX_GRAMMAR_BYTES, SamplingParams, TokenLogprobs, sampling_problem


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


GOOD = SamplingParams(max_tokens=1, seed=0)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1 << 40},
        {"seed": (1 << 64) - 1},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 5e-324, "top_k": 1, "min_p": 1.0},
        {"repetition_penalty": 5e-324, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((0, -100.0), (9, 100.0)), "stop_token_ids": (0, 9)},
        {"logprobs": 20, "prompt_logprobs": 0, "min_tokens": 5},
        {"grammar": "é" * (MAX_GRAMMAR_BYTES // 2)},
    ],
)
def test_what_a_sampler_obeys(changes: dict[str, object]) -> None:
    assert sampling_problem(msgspec.structs.replace(GOOD, **changes), 10) is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"seed": value} for value in (-1, 1 << 64)),
        *({"temperature": value} for value in (-0.1, 2.1, NAN, INF)),
        *({"top_p": value} for value in (0.0, -1.0, 1.1, NAN)),
        *({"top_k": value} for value in (0, -1, 1 << 32)),
        *({"min_p": value} for value in (-0.1, 1.1, NAN)),
        *({"repetition_penalty": value} for value in (0.0, -1.0, 2.1, INF, NAN)),
        *({"presence_penalty": value} for value in (-2.1, INF)),
        *({"frequency_penalty": value} for value in (2.1, NAN)),
        *({"max_tokens": value} for value in (0, -1)),
        *({"min_tokens": value} for value in (-1, 1 << 32)),
        *({"logprobs": value} for value in (-1, 21, 10**6)),
        *({"prompt_logprobs": value} for value in (-1, 10**6)),
        *({"stop_token_ids": (value,)} for value in (-1, 10, 10**9)),
        *({"logit_bias": ((value, 1.0),)} for value in (-1, 10)),
        *({"logit_bias": ((1, value),)} for value in (NAN, INF)),
        {"grammar": "é" * (MAX_GRAMMAR_BYTES // 2) + "x"},
    ],
)
def test_what_no_sampler_can_obey(changes: dict[str, object]) -> None:
    assert sampling_problem(msgspec.structs.replace(GOOD, **changes), 10)
