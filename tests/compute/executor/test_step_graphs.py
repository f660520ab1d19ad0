"""Decode steps recorded and replayed on a CPU (tests/compute/attention/step_tape.py): whole models against each step by
itself, to the bit; and which steps those are."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, StepAttention
from deltaserve.compute.attention.fixed_step import FixedStepBackend
from deltaserve.compute.executor.inputs import StepInputs, UnreadTokens, Wanted
from deltaserve.compute.executor.step_graphs import StepGraphs, bucket_of
from deltaserve.compute.layers.decoder import Hidden
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, interpreting_process, needs_triton, run_in
from tests.compute.executor.replaying import (
    DECODING,
    NUM_RECORDED,
    EagerDriver,
    RecordingDriver,
    Repeating,
    ReplayingDriver,
    decode_together,
)
from tests.compute.executor.world import Driver

# ---------------------------------------------------------------- whole models by Triton's kernels


@pytest.fixture(scope="module")
def process() -> Iterator[KernelProcess]:
    yield from interpreting_process()


def check_replays(folder: Path, kinds: Sequence[type[RecordingDriver]]) -> None:
    """Check replays; the first kind shares what its rows have in common, the second does not."""
    want = decode_together(EagerDriver(folder))
    for kind, shares in zip(kinds, (True, False), strict=False):
        tape = StepTape()
        got = decode_together(kind(folder, tape), shares)
        assert got.tokens == want.tokens
        assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))
        assert (tape.num_recorded, tape.num_replayed) == (NUM_RECORDED, len(DECODING))


@needs_triton
def test_replays_compute_what_steps_do(process: KernelProcess, tiny_models: Path) -> None:
    """Launched ahead of the tokens that they begin with, or not, and whether rows share what they read or not."""
    run_in(process, check_replays, tiny_models / "llama", (ReplayingDriver, RecordingDriver))


@needs_triton
def test_replays_over_windows(process: KernelProcess, tiny_models: Path) -> None:
    """And of embeddings that are scaled."""
    run_in(process, check_replays, tiny_models / "gemma3_text", (ReplayingDriver,))


# ---------------------------------------------------------------- which models


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", "its attention backend has no such steps"),
        ("gemma3_text", "its attention backend has no such steps"),
        ("qwen3_moe", "the rows of its experts are counted on the host"),
        ("deepseek_v3", "the rows of its experts are counted on the host"),
        ("qwen3_5_text", "its recurrent layers cut steps on the host"),
    ],
)
def test_a_line_says_why_steps_are_not_recorded(
    tiny_models: Path, name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Recording(Driver):
        graph_rows = 8

        def recorder(self, device: torch.device) -> StepTape:
            return StepTape()

    caplog.set_level(logging.INFO)
    Recording(tiny_models / name)
    lines = [record.message for record in caplog.records if record.message.startswith("CUDA graphs")]
    assert lines == [f"CUDA graphs: none of this model's steps ({reason})"]


def check_experts_cannot_be_recorded(folder: Path) -> None:
    driver = EagerDriver(folder)
    decoder, attention = driver.executor._decoder, driver.executor._attention
    assert isinstance(attention, FixedStepBackend)
    step = attention.fixed_step(Batch((Query(0, 3, 1),), 32), 1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="in a step that is recorded"):
        StepTape().record(lambda: _forward(decoder, step.attention))


def _forward(decoder: Any, attention: Sequence[StepAttention]) -> None:
    decoder.forward(torch.tensor([5]), torch.tensor([3]), attention)


@needs_triton
def test_experts_would_wait_for_the_device(process: KernelProcess, tiny_models: Path) -> None:
    run_in(process, check_experts_cannot_be_recorded, tiny_models / "qwen3_moe")


# ---------------------------------------------------------------- which steps, and what they are computed as


class Sums:
    """In place of a decoder: of each row its token and 1,000 times its position."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Sequence[StepAttention]) -> Hidden:
        normed = (tokens + 1000 * positions)[:, None]
        return Hidden(normed, -normed, None)


class Rooms(FixedStepBackend):
    """In place of attention. A step has room for positions less than a power of two."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def fixed_step(self, batch: Batch, num_rows: int) -> "Room":
        room = 1 << max(query.q_start for query in batch.queries).bit_length()
        self.made.append((num_rows, room))
        return Room(room)


class Room:
    attention: Sequence[StepAttention] = ()

    def __init__(self, most: int) -> None:
        self._most = most

    def fill(self, batch: Batch) -> bool:
        return max(query.q_start for query in batch.queries) < self._most


class Counting(Repeating):
    """`error`: of the next recording."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_asked = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return Repeating.record(self, run)


def graphs_of(max_rows: int) -> tuple[StepGraphs, Rooms, Counting, Tensor]:
    rooms, recorder, drawn = Rooms(), Counting(), torch.arange(100, 100 + max_rows)
    return StepGraphs(Sums(), rooms, drawn, max_rows, recorder), rooms, recorder, drawn  # type: ignore[arg-type]


def inputs_of(tokens: Sequence[int], positions: Sequence[int], unread: dict[int, int] | None = None) -> StepInputs:
    """`unread`: place |-> row, of tokens that the device alone knows."""
    batch = Batch(tuple(Query(row, position, 1) for row, position in enumerate(positions)), 16)
    places, rows = (np.array(list(part), np.int64) for part in ((unread or {}), (unread or {}).values()))
    return StepInputs(
        batch=batch,
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        wanted=Wanted(batch, np.arange(len(tokens)), tuple(range(1, len(tokens) + 1))),
        unread=UnreadTokens(places, rows),
    )


def test_numbers_of_rows() -> None:
    found = [bucket_of(num_rows, 37) for num_rows in range(1, 38)]
    assert sorted(set(found)) == [1, 2, 4, 8, 16, 24, 32, 37]
    assert all(bucket >= num_rows for num_rows, bucket in enumerate(found, 1))
    assert bucket_of(3, 3) == 3


def test_a_step_is_its_rows_and_no_others() -> None:
    graphs, rooms, _, drawn = graphs_of(8)
    for tokens, positions, unread in (
        ([1, 2, 3], [9, 8, 7], {1: 4}),
        ([5, 6, 7, 8], [3, 2, 1, 0], {}),
        ([4], [6], {0: 7}),
    ):
        hidden = graphs.forward(inputs_of(tokens, positions, unread))
        assert hidden is not None
        for place, row in unread.items():
            tokens[place] = int(drawn[row])
        assert hidden.normed[:, 0].tolist() == [t + 1000 * p for t, p in zip(tokens, positions, strict=True)]
        assert hidden.residual.tolist() == (-hidden.normed).tolist()
        drawn += 1000
    assert rooms.made == [(4, 16), (1, 8)]


def test_a_step_that_needs_more_room_is_recorded_again() -> None:
    graphs, rooms, recorder, _ = graphs_of(4)
    for position in (3, 3, 4, 7, 100, 3):
        hidden = graphs.forward(inputs_of([1, 1], [position, 0]))
        assert hidden is not None
        assert hidden.normed[:, 0].tolist() == [1000 * position + 1, 1]
    assert rooms.made == [(2, 4), (2, 8), (2, 128)]
    assert recorder.num_asked == 3


def test_other_steps_are_not_recorded() -> None:
    graphs, rooms, _, _ = graphs_of(4)
    fitting = inputs_of([1, 2], [5, 6])
    long = Batch((Query(0, 5, 2),), 16)
    guessing = Batch(fitting.batch.queries, 16, (), (1,))
    part = Wanted(fitting.batch, np.arange(1), (0, 1))
    for changes in ({"batch": long}, {"batch": guessing}, {"wanted": part}):
        fields = {name: getattr(fitting, name) for name in ("batch", "tokens", "positions", "wanted", "unread")}
        assert graphs.forward(StepInputs(**fields | changes)) is None
    assert graphs.forward(inputs_of([1] * 5, [1] * 5)) is None, "more rows than are recorded"
    assert not rooms.made


def test_where_a_recording_fails_steps_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    graphs, rooms, recorder, _ = graphs_of(4)
    assert graphs.forward(inputs_of([1], [1])) is not None
    recorder.error = RuntimeError("operation not permitted when stream is capturing\nand a page more")
    assert [graphs.forward(inputs_of([1] * n, [1] * n)) for n in (2, 2, 1, 4)] == [None] * 4
    assert (recorder.num_asked, len(rooms.made)) == (2, 2)
    assert [record.message for record in caplog.records] == [
        "CUDA graphs: none from now on; to record a step of 2 rows ends with "
        "RuntimeError: operation not permitted when stream is capturing"
    ]
