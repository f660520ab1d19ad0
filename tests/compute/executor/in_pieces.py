"""A driver whose steps are recorded in pieces, and a schedule of steps of all kinds that have more than decode rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.grouped_experts import StackedExperts, clamped_gated
from deltaserve.compute.layers.step_ops import StepOps, TorchOps
from deltaserve.control.sched.plan import ItemResult, PlanItem, TokenValues
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import pack_u32
from deltaserve.model.layers.layer_spec import Activation
from tests.compute.executor.world import GREEDY, Driver, extend, random_tokens
from tests.compute.layers.triton_ops_checks import opened

MakeOps = Callable[..., StepOps]


class AllExperts:
    """GroupedExperts by torch: every expert computes every row, so nobody counts. Bits of a row are its own."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops

    def __call__(self, x: Tensor, chosen: Tensor, gains: Tensor, experts: StackedExperts) -> Tensor:
        outs = torch.stack([self._of(x, expert, experts) for expert in range(len(experts.down))], 1)  # [T, E, hidden]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rank in range(chosen.shape[1]):
            places = chosen[:, rank, None, None].expand(-1, 1, x.shape[1])
            total.addcmul_(outs.gather(1, places)[:, 0].float(), gains[:, rank, None])
        return total.to(x.dtype)

    def _of(self, x: Tensor, expert: int, experts: StackedExperts) -> Tensor:
        biases = [None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)]
        both = self._ops.product(x, experts.gate_up[expert], biases[0])
        if experts.clamped is None:
            return self._ops.product(self._ops.gated(both, Activation.SILU), experts.down[expert], biases[1])
        return self._ops.product(clamped_gated(both, experts.clamped), experts.down[expert], biases[1])


def torch_ops(*_: object) -> StepOps:
    """Operators whose experts can be recorded."""
    ops = TorchOps()
    ops.grouped = AllExperts(ops)
    return ops


def triton_ops_of(device: str) -> MakeOps:
    """Operators by Triton's kernels, on the CPU of a process in which they are interpreted."""
    return staticmethod(lambda *_: opened(device))


class PlainDriver(Driver):
    """By torch, on a CPU."""

    attention = "torch"
    make_ops: MakeOps = staticmethod(torch_ops)

    def __init__(self, path: Path, device: str = "cpu") -> None:
        with (
            patch("deltaserve.compute.executor.runner.make_step_ops", self.make_ops),
            patch("deltaserve.compute.weights.packing.packing_pays", return_value=False),
        ):
            Driver.__init__(self, path, num_pages=160, device=device)


class PieceDriver(PlainDriver):
    """And in pieces."""

    graph_rows = 4
    piece_tokens = 128

    def __init__(self, path: Path, recorder: StepRecorder, device: str = "cpu") -> None:
        self._recorder = recorder
        PlainDriver.__init__(self, path, device)

    def recorder(self, device: torch.device) -> StepRecorder | None:
        return self._recorder


class Told(NamedTuple):
    """What a schedule comes to."""

    items: list[tuple[ItemResult, ...]]
    """Results of each step: tokens with all log-probabilities, those of prompts, too."""
    pages: list[Tensor]
    """Bytes of each arena."""


PROMPT_LENS = (205, 33, 75, 32, 1, 97)
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 70),),
    ((1, 33),),
    ((0, 205), (2, 3)),
    ((2, 75), (3, 32), (4, 1)),
    ((5, 97),),
)
"""Rows that have a part of their prompt computed, and where it ends; all whose prompt is over decode beside them. The
third step has more tokens than are recorded."""
QUIET = frozenset({0, 5})
"""Rows that ask for no log-probabilities of their prompts: only last tokens are computed to the end, or none."""
GUESSING, GUESSES = 3, (7, 9)
"""A row that decodes with guesses, which are wrong as a rule."""


def told(driver: Driver, num_decode: int = 3) -> Told:
    """All results of the schedule, and of decode steps behind it."""
    prompts = [random_tokens(length, 20 + row) for row, length in enumerate(PROMPT_LENS)]
    items: list[tuple[ItemResult, ...]] = []
    ends: dict[int, int] = {}
    drawn: dict[int, int] = {}

    def step(extends: list[PlanItem]) -> None:
        decodes = [_decode(row, ends[row], token) for row, token in drawn.items()]
        result = driver.step([*decodes, *extends])
        items.append(result.items)
        for item in result.items:
            if item.row in drawn:
                ends[item.row] += len(item.drawn)
            if item.drawn:
                drawn[item.row] = item.drawn[-1].token

    for parts in STEPS:
        extends = []
        for row, end in parts:
            if row not in ends:
                driver.open(row, prompts[row], GREEDY, 224)
            chunk = extend(row, prompts[row], ends.get(row, 0), end)
            extends.append(replace(chunk, wants_prompt_logprobs=row not in QUIET))
        step(extends)
        ends.update(parts)
    for _ in range(num_decode):
        step([])
    return Told(items, [arena.bytes.cpu().clone() for arena in driver.executor.memory.kv.arenas])


def _decode(row: int, position: int, token: int) -> PlanItem:
    guesses = GUESSES if row == GUESSING else ()
    inputs = TokenValues(pack_u32([token, *guesses]))
    return PlanItem(RowId(row), position, 1 + len(guesses), inputs, True, num_drafts=len(guesses))


def assert_same(got: Told, want: Told) -> None:
    """To the bit."""
    for number, (mine, others) in enumerate(zip(got.items, want.items, strict=True)):
        assert mine == others, f"step {number}"
    assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))
