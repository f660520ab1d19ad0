"""Coverage: chunks in any order, complete exactly when their union is everything and one was last."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.transfer.coverage import Coverage, Landing
from deltaserve.core.wire.messages import Done, Piece


def chunk(index: int, first: int, num_pages: int, is_last: bool = False, checksums: bytes = b"") -> Done:
    """A chunk with pages of pool 0 alone."""
    pieces = (Piece(pool=0, first=first, end=first + num_pages, checksums=checksums),) if num_pages else ()
    return chunk_of(index, *pieces, is_last=is_last)


def chunk_of(index: int, *pieces: Piece, is_last: bool = False) -> Done:
    payload = b"first token" if is_last else None
    return Done(ticket=1, reader_boot=2, writer_boot=3, chunk=index, pieces=pieces, payload=payload)


def piece(pool: int, first: int, end: int) -> Piece:
    return Piece(pool=pool, first=first, end=end)


def test_the_payload_is_that_of_the_last_chunk() -> None:
    coverage = Coverage([range(3)])
    coverage.land(chunk(0, 0, 2))
    assert coverage.payload is None
    coverage.land(chunk(1, 2, 1, is_last=True))
    assert coverage.payload == b"first token"


def test_zero_pages_are_complete_with_the_last_chunk_and_not_before() -> None:
    coverage = Coverage([range(0)])
    assert not coverage.is_complete
    assert coverage.land(chunk(0, 0, 0, is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_chunks_land_in_any_order(order: tuple[int, ...]) -> None:
    chunks = [chunk(0, 0, 2), chunk(1, 2, 3), chunk(2, 5, 1, is_last=True)]
    coverage = Coverage([range(6)])
    for index in order:
        assert not coverage.is_complete
        assert coverage.land(chunks[index]) is Landing.ACCEPTED
    assert coverage.is_complete


def test_a_repeat_has_no_effect_and_a_contradiction_is_refused() -> None:
    coverage = Coverage([range(4)])
    assert coverage.land(chunk(0, 0, 2)) is Landing.ACCEPTED
    assert coverage.land(chunk(0, 0, 2)) is Landing.REPEATED
    assert coverage.land(chunk(0, 0, 2, checksums=b"abcd")) is Landing.REFUSED
    assert coverage.land(chunk(0, 2, 2)) is Landing.REFUSED
    assert coverage.num_landed == 1


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
    coverage = Coverage([range(4)])
    coverage.land(chunk(0, 0, 2))
    assert coverage.land(bad) is Landing.REFUSED
    assert coverage.land(chunk(1, 2, 2, is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


def test_pools_cover_pages_of_their_own() -> None:
    """One has pages from 2 on, one only the last two, one has nothing to get."""
    coverage = Coverage([range(2, 6), range(4, 6), range(6, 6)])
    assert coverage.land(chunk_of(0, piece(0, 2, 4))) is Landing.ACCEPTED
    assert coverage.land(chunk_of(1, piece(0, 4, 6), piece(1, 4, 5))) is Landing.ACCEPTED
    assert not coverage.is_complete
    assert coverage.land(chunk_of(2, piece(1, 5, 6), is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


@pytest.mark.parametrize(
    "pieces",
    [
        (piece(0, 1, 3),),
        (piece(1, 2, 4),),
        (piece(2, 6, 7),),
        (piece(3, 2, 3),),
        (piece(-1, 2, 3),),
        (piece(0, 2, 3), piece(0, 3, 4)),
        (piece(1, 4, 5), piece(0, 2, 3)),
        (piece(0, 2, 4), piece(1, 4, 7)),
        (piece(0, 3, 3),),
        (piece(0, 4, 3),),
    ],
    ids=[
        "before its first",
        "another pool's",
        "of a pool with none",
        "unknown pool",
        "negative pool",
        "pool twice",
        "pools in disorder",
        "second beyond",
        "empty piece",
        "backwards",
    ],
)
def test_pieces_that_were_not_granted_are_refused_as_a_whole(pieces: tuple[Piece, ...]) -> None:
    coverage = Coverage([range(2, 6), range(4, 6), range(6, 6)])
    assert coverage.land(chunk_of(0, *pieces)) is Landing.REFUSED
    assert coverage.land(chunk_of(0, piece(0, 2, 6), piece(1, 4, 6), is_last=True)) is Landing.ACCEPTED
    assert coverage.is_complete


def test_nothing_comes_after_the_last_chunk() -> None:
    coverage = Coverage([range(4)])
    coverage.land(chunk(2, 2, 2, is_last=True))
    assert coverage.land(chunk(3, 0, 1)) is Landing.REFUSED
    assert coverage.land(chunk(1, 0, 2, is_last=True)) is Landing.REFUSED
    assert coverage.land(chunk(0, 0, 1)) is Landing.ACCEPTED
    assert not coverage.is_complete
    assert coverage.land(chunk(1, 1, 1)) is Landing.ACCEPTED
    assert coverage.is_complete


def test_a_last_chunk_below_one_that_landed_is_refused() -> None:
    coverage = Coverage([range(4)])
    coverage.land(chunk(3, 0, 2))
    assert coverage.land(chunk(2, 2, 2, is_last=True)) is Landing.REFUSED
    assert not coverage.is_complete


@given(st.lists(st.integers(1, 4), max_size=6), st.randoms(use_true_random=False))
def test_any_cut_in_any_order_with_repeats_completes_once(sizes: list[int], rng: object) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [chunk(i, start, size) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    chunks.append(chunk(len(sizes), sum(sizes), 0, is_last=True))
    rng.shuffle(chunks)  # type: ignore[attr-defined]
    coverage = Coverage([range(sum(sizes))])
    for index, done in enumerate(chunks):
        assert coverage.land(done) is Landing.ACCEPTED
        assert coverage.land(done) is Landing.REPEATED
        assert coverage.is_complete == (index == len(chunks) - 1)
