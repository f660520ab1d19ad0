"""Prefill and decode with a window beside full attention: of the window only what is still seen is kept and moved."""

import pytest

from deltaserve.control.engine.checks import grant_fits
from deltaserve.core.ids import PoolId
from deltaserve.core.layout.prompt_pages import PromptPages
from deltaserve.core.tokens import pack_u32, token_len
from deltaserve.core.wire.messages import Component, Grant
from deltaserve.sim.cluster import Shape, worker_config
from deltaserve.sim.rank_memory import STAMP_BYTES
from tests.control.engine.duo import DECODE, PREFILL, Duo

SHAPE = Shape(num_pools=2, window_len=9, spare_pages=0)
PAGE_BYTES = 4 * STAMP_BYTES


@pytest.mark.parametrize(("prompt_len", "first"), [(3, 0), (8, 0), (12, 1), (41, 8), (100, 23)])
def test_only_the_window_moves(prompt_len: int, first: int) -> None:
    duo = Duo(SHAPE)
    duo.serve([i % 90 for i in range(prompt_len)], 5)
    full, window = duo.sent(Grant, DECODE)[-1].coverage
    num_pages = -(-prompt_len // 4)
    assert (full.first, token_len(full.pages)) == (0, num_pages)
    assert (window.first, token_len(window.pages)) == (first, num_pages - first)
    landed = duo.decode.metrics()["deltaserve_transfer_bytes_landed_total"]
    assert landed == (2 * num_pages - first) * PAGE_BYTES


def test_a_window_that_decode_still_has_does_not_move() -> None:
    duo = Duo(Shape(num_pools=2, window_len=9))
    duo.serve(list(range(40)), 1)
    duo.serve([*range(40), 50], 3)
    full, window = duo.sent(Grant, DECODE)[-1].coverage
    assert [(c.first, token_len(c.pages)) for c in (full, window)] == [(10, 1), (10, 1)]


def test_a_window_that_decode_has_no_more_moves_again_without_its_full_pages() -> None:
    duo = Duo(Shape(num_pools=2, window_len=9))
    duo.serve(list(range(40)), 1)
    duo.decode.parts.cache.evict((0, 1000))
    asked = duo.serve([*range(40), 50], 6)
    full, window = duo.sent(Grant, DECODE)[-1].coverage
    assert [(c.first, token_len(c.pages)) for c in (full, window)] == [(10, 1), (8, 3)]
    assert asked.usage.decode_cached_len == 40


def test_prefill_computes_again_what_it_lacks_the_window_for() -> None:
    duo = Duo(Shape(num_pools=2, window_len=9))
    duo.serve(list(range(40)), 1)
    duo.prefill.parts.cache.evict((0, 1000))
    asked = duo.serve([*range(40), 50], 6)
    assert (asked.usage.decode_cached_len, asked.usage.prefill_cached_len) == (40, 0)


def test_many_long_prompts_share_small_window_pools() -> None:
    duo = Duo(Shape(num_pools=2, window_len=20, spare_pages=1, prefill_pages=200, decode_pages=200))
    asked = [duo.ask([i, *range(60 + 5 * i)], 20) for i in range(6)]
    duo.settle(*asked)


@pytest.mark.parametrize(("first", "fits"), [(8, True), (9, True), (7, False), (0, False)])
def test_a_grant_for_pages_behind_the_window_is_refused(first: int, fits: bool) -> None:
    """Prefill does not have them any more."""
    role = SHAPE.roles()[PREFILL]
    config = worker_config(SHAPE, PREFILL, role, 1)
    spans = {PoolId(0): range(11), PoolId(1): range(first, 11)}
    coverage = tuple(Component(pool=p, first=s.start, pages=pack_u32(range(len(s)))) for p, s in spans.items())
    grant = Grant(room=bytes(16), attempt=1, ticket=1, coverage=coverage)
    assert grant_fits(config, (64, 64), grant, PromptPages(41, 4, 4)) is fits
