"""Page keys: a chain that names a prefix, its page size, its model, its tenant and its cluster."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.ids import Namespace
from deltaserve.core.keys import KEY_BYTES, PromptKeys, common_keys, extend_keys, key_at, num_keys, seed_key
from deltaserve.core.tokens import pack_u32

SECRET = b"s" * 32
SEED = seed_key(SECRET, "model", 4, Namespace("tenant"))
prompts = st.lists(st.integers(0, 50), max_size=40)


def keys_of(tokens: list[int], page_size: int = 4, seed: bytes = SEED) -> bytes:
    return extend_keys(seed, pack_u32(tokens), page_size)


@given(prompts, st.sampled_from([1, 2, 4, 8]))
def test_one_key_for_each_full_page(tokens: list[int], page_size: int) -> None:
    assert num_keys(keys_of(tokens, page_size)) == len(tokens) // page_size


@given(prompts, prompts)
def test_equal_keys_iff_equal_prefixes(first: list[int], second: list[int]) -> None:
    for index in range(min(len(first), len(second)) // 4):
        same_key = key_at(keys_of(first), index) == key_at(keys_of(second), index)
        assert same_key == (first[: (index + 1) * 4] == second[: (index + 1) * 4])


@given(prompts, st.integers(0, 10))
def test_a_chain_may_be_extended_where_it_stopped(tokens: list[int], split: int) -> None:
    whole = keys_of(tokens)
    start = min(split, num_keys(whole))
    last = key_at(whole, start - 1) if start else SEED
    assert whole[: start * KEY_BYTES] + extend_keys(last, pack_u32(tokens[start * 4 :]), 4) == whole


def test_an_output_kept_as_bytearray_has_the_same_keys() -> None:
    packed = pack_u32(range(16))
    assert extend_keys(SEED, bytearray(packed), 4) == extend_keys(SEED, packed, 4)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_partial_page_has_no_key(size: int) -> None:
    assert keys_of(list(range(size))) == b""


def test_a_prompt_has_a_chain_for_each_model_and_page_size_computed_once() -> None:
    asked: list[tuple[str, int]] = []

    def seed(model: str, page_size: int) -> bytes:
        asked.append((model, page_size))
        return seed_key(SECRET, model, page_size, Namespace("tenant"))

    keys = PromptKeys(seed, pack_u32(range(50)))
    for model, page_size in (("a", 4), ("a", 16), ("b", 4), ("a", 4), ("b", 4), ("a", 1)):
        expected = extend_keys(seed_key(SECRET, model, page_size, Namespace("tenant")), pack_u32(range(50)), page_size)
        assert keys.of(model, page_size) == expected
    assert asked == [("a", 4), ("a", 16), ("b", 4), ("a", 1)]
    assert keys.of("a", 0) == b""


@pytest.mark.parametrize("guess", range(7))
def test_the_keys_that_two_chains_have_in_common(guess: int) -> None:
    chains = {n: keys_of([*range(n), *range(100, 120 - n)]) for n in range(0, 24, 4)}
    for (a, ours), (b, theirs) in itertools.product(chains.items(), repeat=2):
        expected = len(ours) // KEY_BYTES if a == b else min(a, b) // 4
        assert common_keys(ours, theirs, guess) == expected
    assert common_keys(b"", chains[0], guess) == 0
    assert common_keys(chains[8][:KEY_BYTES], chains[8], guess) == 1


def test_each_part_of_the_seed_counts() -> None:
    seeds = [
        seed_key(secret, fingerprint, page_size, Namespace(namespace))
        for secret, fingerprint, page_size, namespace in itertools.product(
            (b"a" * 32, b"b" * 32), ("m", "n"), (16, 64), ("", "x")
        )
    ]
    assert len(set(seeds)) == 16
    assert {len(seed) for seed in seeds} == {KEY_BYTES}


def test_parts_of_the_seed_do_not_run_into_each_other() -> None:
    assert seed_key(SECRET, "ab", 1, Namespace("c")) != seed_key(SECRET, "a", 1, Namespace("bc"))
    assert seed_key(SECRET, "a1", 6, Namespace("")) != seed_key(SECRET, "a", 16, Namespace(""))


def test_keys_do_not_change_between_releases() -> None:
    """Public events and residency maps outlive a process; a changed hash must be a decision."""
    assert SEED.hex() == "3d52084f9a5939e84eeacde85eff99b0"
    assert keys_of(list(range(8))).hex() == "d9972c6e49d43fef232a58c95839e2a0386fc37cf5800a9d19122af5480c27c5"
