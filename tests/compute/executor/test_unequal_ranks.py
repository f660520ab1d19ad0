"""Prefill on P ranks, decode on D: pages go by the plan, and what decode says is what transformers says.

Every (P, D) of {1, 2, 4}, each family; the pages directly and through a staging buffer, page sizes equal and not;
decode knows nothing of the prompt, a part of it, or all. Ranks are threads of this process.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deltaserve.compute.memory.staged_copies import StagedCopies
from deltaserve.control.sched.plan import PlanItem, TokenValues
from deltaserve.core.ids import RegionId, RowId
from deltaserve.core.layout.copy_plan import PlacedPages, Route, plan_cache
from deltaserve.core.layout.staged_route import StagedRoute
from deltaserve.core.tokens import pack_u32
from tests.cells import cells
from tests.compute.executor.world import (
    RankDriver,
    assert_same,
    drawn,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)
from tests.fixtures.tiny_models import VARIANTS, Variant, write_variant

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "qwen3_moe", "minimax_m2", "deepseek_v3")
SIZES = (1, 2, 4)
PAGE_SIZE = 16
"""Page size of prefill."""
FIRST = random_tokens(80, 1)
SECOND = FIRST[:64] + random_tokens(21, 2)
PROMPTS = (FIRST, SECOND, FIRST)
"""Prompts of rows 0, 1 and 2: decode holds nothing of the first, 64 tokens of the second, and all of the third."""
NUM_DECODE = 3

Move = Callable[[Route, Tensor, PlacedPages, Tensor, PlacedPages], None]


def directly(route: Route, source: Tensor, src: PlacedPages, target: Tensor, dst: PlacedPages) -> None:
    for here, there in route.copies(src, dst):
        assert here.num_bytes == there.num_bytes
        target[there.offset : there.offset + there.num_bytes] = source[here.offset : here.offset + here.num_bytes]


def staged(route: Route, source: Tensor, src: PlacedPages, target: Tensor, dst: PlacedPages) -> None:
    if route.has_nothing:
        return
    through = StagedRoute.of(route)
    tokens = through.tokens(src, dst)
    buffer = torch.empty(through.num_bytes(len(tokens)), dtype=torch.uint8)
    for _ in StagedCopies(CPU).gather(through, source, src, tokens, buffer):
        pass
    for _ in StagedCopies(CPU).scatter(through, buffer, target, dst, tokens):
        pass


class Prefilled(NamedTuple):
    """A worker whose rows 0 and 1 hold FIRST and SECOND."""

    driver: RankDriver
    drawn: tuple[int, ...]
    """Token drawn behind each of PROMPTS."""


@cache
def prefilled(path: Path, num_ranks: int) -> Prefilled:
    driver = RankDriver(path, num_ranks, PAGE_SIZE)
    tokens = []
    for row, prompt in enumerate((FIRST, SECOND)):
        driver.open(row, prompt, capacity=96)
        driver.step([extend(row, prompt, 0, 32)])
        tokens.append(drawn(driver.step([extend(row, prompt, 32, len(prompt))]).items[0]))
    return Prefilled(driver, (*tokens, tokens[0]))


@cache
def decoder(path: Path, num_ranks: int, page_size: int) -> RankDriver:
    return RankDriver(path, num_ranks, page_size)


def hand_over(prefill: RankDriver, decode: RankDriver, row: int, held: int, move: Move) -> int:
    """The pages of a prompt that decode lacks, from each rank to each. `held`: tokens decode has. -> pages sent"""
    source_row = row % 2
    spec, theirs = prefill.ranks[0].memory.kv.cache, decode.ranks[0].memory.kv.cache
    plan = plan_cache(spec, len(prefill.ranks), theirs, len(decode.ranks))
    (group,) = spec.groups
    end, first = len(PROMPTS[row]), held // PAGE_SIZE
    src = PlacedPages(RegionId(0), first, prefill.pages[source_row][first : -(-end // PAGE_SIZE)])
    start = held // decode.page_size
    dst = PlacedPages(RegionId(0), start, decode.pages[row][start : -(-end // decode.page_size)])
    for writer, source in enumerate(prefill.ranks):
        for reader, target in enumerate(decode.ranks):
            route = plan.route(group.name, writer, reader)
            move(route, source.memory.kv.page_arenas[0].bytes, src, target.memory.kv.page_arenas[0].bytes, dst)
    return len(src.pages)


def go_on(prefill: Prefilled, decode: RankDriver, move: Move) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Three hand-overs, then decoding together. -> what each row says, and the distributions behind it, [V] each"""
    for rank in decode.ranks:
        rank.memory.kv.page_arenas[0].bytes.fill_(0xFF)  # NaN: what did not arrive is seen
    outputs = [[token] for token in prefill.drawn]
    held = (0, 64, len(FIRST) // decode.page_size * decode.page_size)
    moved = []
    for row, prompt in enumerate(PROMPTS):
        decode.open(row, [*prompt, *outputs[row]], capacity=96, prefix_of=0 if row else None, prefix_len=held[row])
        moved.append(hand_over(prefill.driver, decode, row, held[row], move))
    assert moved[:2] == [5, 2]
    assert moved[2] == (len(FIRST) - held[2]) // PAGE_SIZE
    lines: list[list[Tensor]] = [[], [], []]
    for count in range(NUM_DECODE):
        items = [one(row, len(prompt) + count, outputs[row][-1]) for row, prompt in enumerate(PROMPTS)]
        for item in decode.step(items).items:
            outputs[item.row].append(drawn(item))
            lines[item.row].append(drawn_distribution(item))
    decode.step([], closes=range(3))
    decode.free += sorted({page for row in range(3) for page in decode.pages[row]}, reverse=True)
    return outputs, lines


def one(row: int, position: int, token: int) -> PlanItem:
    return PlanItem(RowId(row), position, 1, TokenValues(pack_u32([token])), True)


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With fewer KV heads than ranks."""
    variant = Variant(VARIANTS["minimax_m2"].build, {"num_key_value_heads": 2})
    return write_variant(variant, tmp_path_factory.mktemp("replicated") / "minimax_m2")


@pytest.mark.parametrize(
    ("name", "num_writers", "num_readers"),
    cells(
        product(FAMILIES, SIZES, SIZES),
        lambda name, *ranks: name not in ("llama", "deepseek_v3") and ranks not in ((1, 2), (2, 1), (2, 4), (4, 2)),
    ),
)
def test_decode_goes_on_where_prefill_ended(tiny_models: Path, name: str, num_writers: int, num_readers: int) -> None:
    check_hand_over(tiny_models / name, num_writers, num_readers)


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 4), (2, 4), (4, 1), (4, 2), (4, 4)])
def test_decode_goes_on_with_replicated_heads(replicated: Path, num_writers: int, num_readers: int) -> None:
    check_hand_over(replicated, num_writers, num_readers)


def check_hand_over(path: Path, num_writers: int, num_readers: int) -> None:
    prefill = prefilled(path, num_writers)
    for move, page_size in ((directly, 16), (staged, 16), (staged, 32), (directly, 8)):
        outputs, lines = go_on(prefill, decoder(path, num_readers, page_size), move)
        for prompt, output, line in zip(PROMPTS, outputs, lines, strict=True):
            want = reference_logprobs(path, prompt + output[:-1])[len(prompt) - 1 :]
            assert output == want.argmax(-1).tolist()
            assert_same(torch.stack(line), want[1:])
