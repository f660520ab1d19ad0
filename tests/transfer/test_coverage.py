"""Coverage: chunks in any order, complete exactly when their union is everything and one was last."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.transfer.coverage import Coverage, Landing
from deltaserve.wire.messages import Done


def chunk(index: int, first: int, num_pages: int, is_last: bool = False, checksums: tuple[bytes, ...] = ()) -> Done:
    return Done(
        ticket=1,
        decode_boot=2,
        prefill_boot=3,
        chunk=index,
        first_page=first,
        num_pages=num_pages,
        checksums=checksums,
        payload=b"first token" if is_last else None,
    )


def test_the_payload_is_that_of_the_last_chunk() -> None:
    coverage = Coverage(3)
    coverage.land(chunk(0, 0, 2))
    assert coverage.payload is None
    coverage.land(chunk(1, 2, 1, is_last=True))
    assert coverage.payload == b"first token"


def test_zero_pages_are_complete_with_the_last_chunk_and_not_before() -> None:
    coverage = Coverage(0)
    assert not coverage.is_complete
    assert coverage.land(chunk(0, 0, 0, is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_chunks_land_in_any_order(order: tuple[int, ...]) -> None:
    chunks = [chunk(0, 0, 2), chunk(1, 2, 3), chunk(2, 5, 1, is_last=True)]
    coverage = Coverage(6)
    for index in order:
        assert not coverage.is_complete
        assert coverage.land(chunks[index]) is Landing.ACCEPTED
    assert coverage.is_complete


def test_a_repeat_has_no_effect_and_a_contradiction_is_refused() -> None:
    coverage = Coverage(4)
    assert coverage.land(chunk(0, 0, 2)) is Landing.ACCEPTED
    assert coverage.land(chunk(0, 0, 2)) is Landing.REPEATED
    assert coverage.land(chunk(0, 0, 2, checksums=(b"abcd",))) is Landing.REFUSED
    assert coverage.land(chunk(0, 2, 2)) is Landing.REFUSED
    assert len(coverage.chunks) == 1


@pytest.mark.parametrize(
    "bad",
    [
        chunk(1, 1, 2),
        chunk(1, 2, 3),
        chunk(1, -1, 1),
        chunk(1, 3, -1),
        chunk(-1, 2, 1),
        chunk(1, 4, 1),
        chunk(1, 2, 0),
    ],
    ids=["overlap", "beyond", "before", "negative", "negative index", "outside", "empty and not last"],
)
def test_what_was_not_granted_is_refused_and_changes_nothing(bad: Done) -> None:
    coverage = Coverage(4)
    coverage.land(chunk(0, 0, 2))
    assert coverage.land(bad) is Landing.REFUSED
    assert coverage.land(chunk(1, 2, 2, is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


def test_nothing_comes_after_the_last_chunk() -> None:
    coverage = Coverage(4)
    coverage.land(chunk(2, 2, 2, is_last=True))
    assert coverage.land(chunk(3, 0, 1)) is Landing.REFUSED
    assert coverage.land(chunk(1, 0, 2, is_last=True)) is Landing.REFUSED
    assert coverage.land(chunk(0, 0, 1)) is Landing.ACCEPTED
    assert not coverage.is_complete
    assert coverage.land(chunk(1, 1, 1)) is Landing.ACCEPTED
    assert coverage.is_complete


def test_a_last_chunk_below_one_that_landed_is_refused() -> None:
    coverage = Coverage(4)
    coverage.land(chunk(3, 0, 2))
    assert coverage.land(chunk(2, 2, 2, is_last=True)) is Landing.REFUSED
    assert not coverage.is_complete


@given(st.lists(st.integers(1, 4), max_size=6), st.randoms(use_true_random=False))
def test_any_cut_in_any_order_with_repeats_completes_once(sizes: list[int], rng: object) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [chunk(i, start, size) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    chunks.append(chunk(len(sizes), sum(sizes), 0, is_last=True))
    rng.shuffle(chunks)  # type: ignore[attr-defined]
    coverage = Coverage(sum(sizes))
    for index, done in enumerate(chunks):
        assert coverage.land(done) is Landing.ACCEPTED
        assert coverage.land(done) is Landing.REPEATED
        assert coverage.is_complete == (index == len(chunks) - 1)
