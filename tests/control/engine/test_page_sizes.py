"""Prefill and decode with pages of unequal sizes: what is sent, what is granted, what each side holds afterwards."""

from itertools import pairwise

import pytest

from deltaserve.control.transfer.commands import Landed
from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import Grant
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, Duo

SIZES = [(16, 64), (64, 16), (1, 16), (16, 1), (16, 48), (48, 16), (12, 8)]


def duo_of(writer: int, reader: int) -> Duo:
    shape = Shape(
        page_size=writer,
        decode_page_size=reader,
        prefill_pages=4 * -(-400 // writer),
        decode_pages=4 * -(-400 // reader),
        chunk_len=2 * writer,
        context_len=400,
        num_heads=2,
        decode_ranks=2,
    )
    return Duo(shape)


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    return [(first + 7 * at) % 97 for at in range(num_tokens)]


@pytest.mark.parametrize(("writer", "reader"), SIZES)
def test_prompts_of_any_length_arrive_whole(writer: int, reader: int) -> None:
    """Their ends lie anywhere in a page of either side. (The oracle reads every page, checksums are on.)"""
    duo = duo_of(writer, reader)
    lengths = {1, reader - 1, reader, reader + 1, writer, writer + 1, 2 * writer + 3, 3 * reader + 5, 150}
    for first, num_tokens in enumerate(sorted(length for length in lengths if length > 0)):
        asked = duo.serve(prompt(num_tokens, first), 3)
        assert (asked.usage.decode_cached_len, asked.usage.prefill_cached_len) == (0, 0)
    duo.cluster.check()


@pytest.mark.parametrize(("writer", "reader"), SIZES)
def test_each_side_holds_prefixes_in_pages_of_its_own(writer: int, reader: int) -> None:
    duo = duo_of(writer, reader)
    shared = prompt(200)
    duo.serve(shared, 1)
    asked = duo.serve([*shared, 5, 6, 7], 3)
    assert asked.usage.decode_cached_len == 200 // reader * reader
    assert asked.usage.prefill_cached_len == 200 // writer * writer
    (component,) = duo.sent(Grant, DECODE)[-1].coverage
    assert component.first == 200 // reader
    assert component.first + token_len(component.pages) == -(-203 // reader)
    duo.prefill.parts.cache.evict((1000,))
    again = duo.serve([*shared, 8, 9], 3)
    assert (again.usage.decode_cached_len, again.usage.prefill_cached_len) == (200 // reader * reader, 0)
    duo.decode.parts.cache.evict((1000,))
    whole = duo.serve([*shared, 8, 9], 3)
    assert (whole.usage.decode_cached_len, whole.usage.prefill_cached_len) == (0, 201 // writer * writer)


@pytest.mark.parametrize(("writer", "reader"), SIZES)
def test_chunks_end_with_pages_of_the_reader(writer: int, reader: int) -> None:
    """A page of the reader is told of once, when all that it holds of the prompt is there."""
    duo = duo_of(writer, reader)
    landed: list[Landed] = []
    worker = duo.worker(DECODE)
    handle = worker.instance.handle

    def heard(event: object, now: float) -> None:
        if isinstance(event, Landed):
            landed.append(event)
        handle(event, now)  # type: ignore[arg-type]

    worker.instance.handle = heard  # type: ignore[method-assign]
    duo.serve(prompt(190), 2)
    of_rank = [event.done for event in landed if event.pair.reader == 0]
    pieces = [piece for done in sorted(of_rank, key=lambda done: done.chunk) for piece in done.pieces]
    assert pieces[0].first == 0
    assert all(one.end == other.first for one, other in pairwise(pieces))
    assert pieces[-1].end == -(-190 // reader)
    assert all(piece.checksums for piece in pieces)
