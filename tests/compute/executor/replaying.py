"""A driver whose decode steps are recorded and replayed, and a schedule of steps that differ in all they can."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.control.sched.plan import (
    DecodePart,
    DecodeRows,
    PlanItem,
    PlanItems,
    SharedRun,
    StepPlan,
    StepResult,
    TokenOf,
)
from deltaserve.core.ids import RowId, StepIndex
from tests.compute.executor.test_launched import LaunchingDriver, prompt_item, rules
from tests.compute.executor.world import Driver, random_tokens
from tests.compute.layers.triton_ops_checks import opened

COMMON = 32
PROMPT_LENS = (38, 43, 34, 58, 36, 7)
DECODING: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4), (1, 2, 3), (2, 3, 4), (3,), (0, 1, 2, 3, 4, 5), (5, 0, 2))
"""Rows of each step. The last row shares nothing."""
GOING_ON: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (0, 2, 5), (2, 3))
"""Rows of runs of steps, which are planned as such."""
RUN_LEN = 3
AFTER = (0, 2, 3, 4)
NUM_STEPS = len(DECODING) + len(GOING_ON) * RUN_LEN + 1
NUM_RECORDED = (5, 4)
"""Steps that are recorded, launched ahead and not: of 6, 4, 2 and 1 rows, and those of 4 rows ahead with row 4, whose
logits are changed before a draw, and without."""
RULES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.0, "logit_bias": ((7, 4.0),), "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.1},
)


def with_parts(model: Path, folder: Path, layers: Sequence[int]) -> Path:
    """A copy with these layers and half of the heads: what a step does to one of a kind it does to all, and each is
    interpreted for long."""
    copy = Path(shutil.copytree(model, folder / model.name))
    config = json.loads((copy / "config.json").read_text())
    changes = {name: config[name] // 2 for name in ("num_attention_heads", "num_key_value_heads")}
    if "layer_types" in config:
        changes["layer_types"] = [config["layer_types"][layer] for layer in layers]
    (copy / "config.json").write_text(json.dumps(config | changes | {"num_hidden_layers": len(layers)}))
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        number = re.match(r"model\.layers\.(\d+)\.", name)
        if number is None:
            tensors[name] = tensor
        elif (layer := int(number[1])) in layers:
            own = f"model.layers.{layers.index(layer)}.{name[number.end() :]}"
            tensors[own] = _of_half_of_the_heads(name, tensor)
    save_file(tensors, copy / "model.safetensors")
    return copy


def _of_half_of_the_heads(name: str, tensor: Tensor) -> Tensor:
    if re.search(r"[qkv]_proj\.(weight|bias)$|sinks$", name):
        return tensor[: len(tensor) // 2].clone()
    return tensor[:, : tensor.shape[1] // 2].clone() if name.endswith("o_proj.weight") else tensor


class EagerDriver(Driver):
    """One step after the other, each launched by itself."""

    attention = "triton"

    def __init__(self, path: Path, device: str = "cpu") -> None:
        Driver.__init__(self, path, split_tokens=COMMON, device=device)


class RecordingDriver(EagerDriver):
    """Replays, one step after the other."""

    graph_rows = 6

    def __init__(self, path: Path, recorder: StepRecorder, device: str = "cpu") -> None:
        self._recorder = recorder
        EagerDriver.__init__(self, path, device)

    def recorder(self, device: torch.device) -> StepRecorder | None:
        return self._recorder


class ReplayingDriver(LaunchingDriver, RecordingDriver):
    """Launches replays ahead."""

    def __init__(self, path: Path, recorder: StepRecorder, device: str = "cpu") -> None:
        self.launched = []
        RecordingDriver.__init__(self, path, recorder, device)


@contextmanager
def as_on_a_gpu(device: str) -> Iterator[None]:
    """What is loaded within has Triton's operators and plain matrices."""
    with (
        patch("deltaserve.compute.executor.runner.make_step_ops", lambda *_: opened(device)),
        patch("deltaserve.compute.weights.packing.packing_pays", return_value=False),
    ):
        yield


class GroupedDriver(EagerDriver):
    """Computes all experts of a layer at once."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        with as_on_a_gpu(device):
            EagerDriver.__init__(self, path, device)


class GroupedReplayingDriver(ReplayingDriver):
    """And launches replays ahead."""

    def __init__(self, path: Path, recorder: StepRecorder, device: str = "cpu") -> None:
        with as_on_a_gpu(device):
            ReplayingDriver.__init__(self, path, recorder, device)


class Repeating:
    """A StepRecorder that calls what it is given each time."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def record_each(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self.record(run) for run in runs]


class Outcome(NamedTuple):
    """What a schedule comes to."""

    tokens: list[list[int]]
    """Tokens of each row."""
    pages: list[Tensor]
    """Bytes of each arena."""
    num_untypical: int
    """Steps that told that their time is not typical."""


def decode_together(driver: Driver, shares: bool = True) -> Outcome:
    """Rows on common pages start one after the other; then steps of other rows each time, who read them together."""
    first = random_tokens(PROMPT_LENS[0], 0)
    results: list[StepResult] = []
    plans: list[StepPlan] = []

    def step(items: Sequence[PlanItem], shared: Sequence[SharedRun] = (), decode: DecodePart | None = None) -> None:
        plan = driver.planned(items, shared)
        if decode is not None:
            plan = replace(plan, items=PlanItems(decode, ()), decode=decode)
        plans.append(plan)
        results.append(driver.run(plan))

    for row, (length, changes) in enumerate(zip(PROMPT_LENS, RULES, strict=True)):
        start = COMMON if 0 < row < 5 else 0
        prompt = first if row == 0 else first[:start] + random_tokens(length - start, row)
        driver.open(row, prompt, rules(row, **changes), 128, 0 if start else None, start)
        if row == 0:  # others go on from the states behind what they have in common
            step([replace(prompt_item(row, prompt[:COMMON]), samples=False)])
        step([prompt_item(row, prompt, COMMON if row == 0 else start)])
    ends, drawn_in = list(PROMPT_LENS), list(range(1, 1 + len(PROMPT_LENS)))

    def of(rows: Sequence[int]) -> tuple[SharedRun, ...]:
        readers = tuple(RowId(row) for row in rows if row < 5)
        return (SharedRun(0, COMMON, readers),) if shares and len(readers) > 1 else ()

    def decode_rows(rows: Sequence[int]) -> None:
        items = [PlanItem(RowId(row), ends[row], 1, TokenOf(StepIndex(drawn_in[row])), True) for row in rows]
        for row in rows:
            ends[row], drawn_in[row] = ends[row] + 1, driver.steps
        step(items, of(rows))

    for rows in DECODING:
        decode_rows(rows)
    for rows in GOING_ON:
        decode_rows(rows)
        named = DecodeRows(tuple(map(RowId, rows)), tuple(ends[row] - driver.steps for row in rows), (), ())
        shared = of(rows)
        for _ in range(RUN_LEN - 1):
            step((), shared, DecodePart(named, driver.steps, StepIndex(driver.steps - 1)))
        for row in rows:
            ends[row], drawn_in[row] = ends[row] + RUN_LEN - 1, driver.steps - 1
    decode_rows(AFTER)
    if isinstance(driver, LaunchingDriver):
        results = [launched.wait() for launched in driver.launched]
    tokens: list[list[int]] = [[] for _ in PROMPT_LENS]
    for plan, result in zip(plans, results, strict=True):
        for item in result.of_all(plan):
            tokens[item.row] += [sampled.token for sampled in item.drawn]
    pages = [arena.bytes.cpu().clone() for arena in driver.executor.memory.kv.arenas]
    return Outcome(tokens, pages, [result.is_typical for result in results].count(False))
