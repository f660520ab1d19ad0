"""Decode steps recorded and replayed on a CPU (tests/compute/attention/step_tape.py): whole models against each step by
itself, to the bit; and which steps those are."""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, Shared, StepAttention, StepStates
from deltaserve.compute.attention.fixed_step import FixedStepBackend, RowsOnDevice, RowsToCome
from deltaserve.compute.attention.plan import Int64s
from deltaserve.compute.executor import given_rows
from deltaserve.compute.executor.given_graphs import GivenGraphs
from deltaserve.compute.executor.inputs import StepInputs, UnreadTokens, Wanted
from deltaserve.compute.executor.randomness import uniform
from deltaserve.compute.executor.recordable_models import why_no_guesses, why_not_recordable
from deltaserve.compute.executor.recordings import Recordings, bucket_of
from deltaserve.compute.executor.resident_draws import MakeDraws, TorchDraws, uniform_on_device
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import (
    LARGEST_BIAS,
    MOST_BIASES,
    DrawKind,
    WayToDraw,
    is_adjusted,
    packed_rules,
)
from deltaserve.compute.executor.sampler import SampleRow, sample
from deltaserve.compute.executor.step_graphs import StepGraphs
from deltaserve.compute.layers.decoder import Hidden
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.control.sched.plan import PageUpdate
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PageId, PoolId, RowId
from deltaserve.core.layout.shard import Shard
from deltaserve.core.sampling import SamplingParams
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.shard_rules import ExpertPlacement
from tests.cells import cells
from tests.compute.attention.compiled_kernels import Constants
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.replaying import (
    NUM_RECORDED,
    NUM_STEPS,
    EagerDriver,
    GroupedDriver,
    GroupedReplayingDriver,
    Outcome,
    RecordingDriver,
    Repeating,
    ReplayingDriver,
    decode_together,
    with_parts,
)
from tests.compute.executor.world import Driver

# ---------------------------------------------------------------- whole models by Triton's kernels


def check_replays(folder: Path, kinds: Sequence[type[RecordingDriver]]) -> None:
    """Check replays; the first kind shares what its rows have in common, the second does not. A step that records
    says that its time is not typical."""
    check_replays_of(decode_together(EagerDriver(folder)), folder, kinds)


def check_replays_of(want: Outcome, folder: Path, kinds: Sequence[type[RecordingDriver]]) -> None:
    for kind, shares, num_recorded in zip(kinds, (True, False), NUM_RECORDED, strict=False):
        tape = StepTape()
        got = decode_together(kind(folder, tape), shares)
        assert got.tokens == want.tokens
        assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))
        assert (tape.num_recorded, tape.num_replayed) == (num_recorded, NUM_STEPS)
        assert got.num_untypical == num_recorded


@needs_triton
def test_replays_compute_what_steps_do(process: KernelProcess, tiny_models: Path, tmp_path: Path) -> None:
    """Launched ahead of the tokens that they begin with, or not, and whether rows share what they read or not."""
    model = with_parts(tiny_models / "llama", tmp_path, (0,))
    run_in(process, check_replays, model, (ReplayingDriver, RecordingDriver))


@needs_triton
def test_replays_over_windows(process: KernelProcess, tiny_models: Path, tmp_path: Path) -> None:
    """And of embeddings that are scaled. Its third layer, the second here, is the first that sees everything."""
    model = with_parts(tiny_models / "gemma3_text", tmp_path, (0, 2))
    run_in(process, check_replays, model, (ReplayingDriver,))


def check_replays_of_experts(folder: Path) -> None:
    """And the tokens are those that one expert after the other gives."""
    want = decode_together(GroupedDriver(folder))
    assert want.tokens == decode_together(EagerDriver(folder)).tokens
    check_replays_of(want, folder, (GroupedReplayingDriver,))


@needs_triton
@pytest.mark.parametrize(
    ("name", "layers"), cells([("qwen3_moe", (0,)), ("gpt_oss", (0, 1))], lambda name, _: name == "gpt_oss")
)
def test_replays_of_experts(process: KernelProcess, tiny_models: Path, tmp_path: Path, name: str, layers: Any) -> None:
    run_in(process, check_replays_of_experts, with_parts(tiny_models / name, tmp_path, layers))


@needs_triton
def test_replays_over_recurrent_states(process: KernelProcess, tiny_models: Path, tmp_path: Path) -> None:
    """Bytes of all states are those that steps by themselves leave: also where pages begin, of rows that join and
    leave, and behind each recording, which computes a step once more than it is replayed."""
    model = with_parts(tiny_models / "qwen3_5_text", tmp_path, (0, 1))
    run_in(process, check_replays, model, (ReplayingDriver, RecordingDriver))


# ---------------------------------------------------------------- which models


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("llama", "none of decode steps (its attention backend has no such steps)"),
        ("gemma3_text", "none of decode steps (its attention backend has no such steps)"),
        ("qwen3_moe", "none of this model's steps (the rows of its experts are counted on the host)"),
        ("deepseek_v3", "none of this model's steps (the rows of its experts are counted on the host)"),
        ("qwen3_5_text", "none of decode steps (its attention backend has no such steps)"),
        ("qwen3_next", "none of this model's steps (the rows of its experts are counted on the host)"),
    ],
)
def test_a_line_says_why_steps_are_not_recorded(
    tiny_models: Path, name: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Recording(Driver):
        graph_rows = 8

        def recorder(self, device: torch.device) -> StepTape:
            return StepTape()

    caplog.set_level(logging.INFO)
    Recording(tiny_models / name)
    lines = [record.message for record in caplog.records if record.message.startswith("CUDA graphs")]
    assert lines == [f"CUDA graphs: {line}"]


def check_experts_cannot_be_recorded(folder: Path) -> None:
    driver = EagerDriver(folder)
    decoder, attention = driver.executor._decoder, driver.executor._attention
    assert isinstance(attention, FixedStepBackend)
    rows = driver.executor._resident
    row = RowsToCome(np.array([0]), np.array([4]), np.array([1]), (), 32)
    step = attention.fixed_step(rows.on_device(1), row)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="in a step that is recorded"):
        StepTape().record(lambda: _forward(decoder, step.attention))


def _forward(decoder: Any, attention: Sequence[StepAttention]) -> None:
    decoder.forward(torch.tensor([5]), torch.tensor([3]), attention)


@needs_triton
def test_experts_one_after_the_other_would_wait_for_the_device(process: KernelProcess, tiny_models: Path) -> None:
    run_in(process, check_experts_cannot_be_recorded, tiny_models / "qwen3_moe")


def test_experts_of_a_group_of_workers_are_a_reason(tiny_models: Path) -> None:
    spec = load_spec(tiny_models / "qwen3_moe")
    assert why_not_recordable(spec) is None
    assert why_not_recordable(spec.placed(ExpertPlacement(ep_size=2))) is None  # of a worker's own ranks: see theirs
    assert why_not_recordable(spec.placed(ExpertPlacement(member=Shard(0, 2)))) == (
        "its experts are spread over a group of workers, whose rows travel by the host"
    )


# ---------------------------------------------------------------- which steps, and what they are computed as


VOCAB = 5000


class Sums:
    """In place of a decoder: of each token itself and 1,000 times its position, which is also what is drawn."""

    spec = SimpleNamespace(vocab_size=VOCAB, recurrent=())

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Sequence[StepAttention], last: None, states: Sequence[Any]
    ) -> Hidden:
        normed = (tokens + 1000 * positions)[:, None]
        return Hidden(normed, -normed, None)

    def hidden_memory(self, num_tokens: int) -> Hidden:
        normed = torch.zeros((num_tokens, 1), dtype=torch.int64)
        return Hidden(normed, normed.clone(), None)

    def stored_logits(self, hidden: Tensor) -> Tensor:
        return torch.arange(VOCAB).eq(hidden % VOCAB).to(torch.float32) * 100.0


class Rooms(FixedStepBackend):
    """In place of attention. A step has room for positions less than a power of two."""

    max_keys = 144

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.shared: list[RowsToCome] = []
        self.num_planned = 0

    def fixed_step(self, on_device: RowsOnDevice, rows: RowsToCome) -> "Room":
        room = 1 << int(rows.ends.max() - 1).bit_length()
        self.made.append((len(on_device.lines), room))
        return Room(self, on_device, room)

    def fixed_group(self, on_device: RowsOnDevice, rows: RowsToCome, group: int) -> "Room":
        return self.fixed_step(on_device, rows)


class Room:
    attention: Sequence[StepAttention] = ()
    states: Sequence[StepStates] = ()
    shared_tokens = 0

    def __init__(self, rooms: Rooms, on_device: RowsOnDevice, most: int) -> None:
        self._rooms, self._on_device, self._most = rooms, on_device, most

    def plan(self) -> None:
        self._rooms.num_planned += 1

    def holds(self, ends: Int64s, lens: Int64s) -> bool:
        return int(ends.max() - 1) < self._most

    def share(self, rows: RowsToCome) -> bool:
        self._rooms.shared.append(rows)
        return True

    def widened(self, rows: RowsToCome) -> "Room":
        return self._rooms.fixed_step(self._on_device, rows)


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


class Replaying(NamedTuple):
    graphs: StepGraphs
    given: GivenGraphs
    rows: ResidentRows
    rooms: Rooms
    recorder: Counting

    @classmethod
    def of(cls, max_rows: int) -> "Replaying":
        rows = ResidentRows(PageTable(1, max_rows, 9), 1, max_rows, torch.device("cpu"))
        rooms, recorder = Rooms(), Counting()
        parts: Any = (Sums(), rooms, rows, max_rows, Recordings(recorder))
        rows.last_drawn[:] = torch.arange(100, 101 + max_rows)
        for row in range(max_rows):
            rules = SamplingParams(max_tokens=9, seed=row, temperature=0.0)
            rows.open(RowId(row), packed_rules(rules, 1, WayToDraw.LARGEST, VOCAB))
        return cls(StepGraphs(*parts), GivenGraphs(*parts), rows, rooms, recorder)

    def draw(self, starts: dict[int, int], given: dict[int, int]) -> list[int] | None:
        """`starts`: row |-> position."""
        lines = tuple(map(RowId, starts))
        step = DecodingRows(lines, np.array(list(starts.values())), {RowId(r): t for r, t in given.items()}, (), 16)
        drawn = self.graphs.draw(step, DrawKind(WayToDraw.LARGEST))
        return None if drawn is None else drawn[0].tolist()


def inputs_of(
    tokens: Sequence[int], starts: Sequence[int], unread: dict[int, int] | None = None, lens: Sequence[int] = ()
) -> StepInputs:
    """`unread`: place |-> row, of tokens that the device alone knows. `lens`: of rows with guesses; (): none has."""
    own = lens or [1] * len(starts)
    queries = tuple(Query(row, *span) for row, span in enumerate(zip(starts, own, strict=True)))
    batch = Batch(queries, 16, (), tuple(row for row, length in enumerate(own) if length > 1))
    places, rows = (np.array(list(part), np.int64) for part in ((unread or {}), (unread or {}).values()))
    return StepInputs(
        batch=batch,
        tokens=np.array(tokens, np.int64),
        positions=batch.positions(),
        wanted=Wanted(batch, np.arange(len(tokens)), tuple(range(1, len(tokens) + 1))),
        unread=UnreadTokens(places, rows),
    )


def test_numbers_of_rows() -> None:
    found = [bucket_of(num_rows, 37) for num_rows in range(1, 38)]
    assert sorted(set(found)) == [1, 2, 4, 8, 16, 24, 32, 37]
    assert all(bucket >= num_rows for num_rows, bucket in enumerate(found, 1))
    assert bucket_of(3, 3) == 3


def test_a_step_is_its_rows_and_no_others() -> None:
    _, graphs, rows, rooms, _ = Replaying.of(8)
    for tokens, positions, unread in (
        ([1, 2, 3], [9, 8, 7], {1: 1}),
        ([5, 6, 7, 8], [3, 2, 1, 0], {}),
        ([4], [6], {0: 0}),
    ):
        hidden = graphs.forward(inputs_of(tokens, positions, unread))
        assert hidden is not None
        for place, row in unread.items():
            tokens[place] = int(rows.last_drawn[row])
        assert hidden.normed[:, 0].tolist() == [t + 1000 * p for t, p in zip(tokens, positions, strict=True)]
        assert hidden.residual.tolist() == (-hidden.normed).tolist()
        rows.last_drawn += 1000
    assert rooms.made == [(4, 16), (1, 8)]


def test_rows_with_guesses_stand_one_behind_the_other() -> None:
    """With more guesses, with fewer and without, in steps of one recording."""
    _, graphs, rows, rooms, recorder = Replaying.of(8)
    for starts, lens, unread in (
        ([5, 9], [3, 2], {}),
        ([4, 2, 7], [1, 4, 1], {0: 0, 5: 2}),
        ([9, 1], [1, 4], {}),
        ([3], [6], {}),
        ([3], [8], {}),
    ):
        tokens = list(range(sum(lens)))
        hidden = graphs.forward(inputs_of(tokens, starts, unread, lens))
        assert hidden is not None
        for place, row in unread.items():
            tokens[place] = int(rows.last_drawn[row])
        positions = [start + place for start, length in zip(starts, lens, strict=True) for place in range(length)]
        assert hidden.normed[:, 0].tolist() == [t + 1000 * p for t, p in zip(tokens, positions, strict=True)]
    assert rooms.made == [(8, 16)]
    assert recorder.num_asked == 1


def test_the_device_goes_on_by_itself() -> None:
    """The token drawn is the next input, at the next position: nothing is told of rows that go on."""
    replaying = Replaying.of(8)
    assert replaying.draw({0: 1, 2: 2, 5: 0}, {0: 7, 5: 3}) == [1007, 2102, 3]
    told = replaying.rows._tell
    replaying.rows._tell = None  # type: ignore[method-assign, assignment]
    assert replaying.draw({0: 2, 2: 3, 5: 1}, {}) == [3007, 102, 1003]
    assert replaying.draw({0: 3, 2: 4, 5: 2}, {}) == [1007, 4102, 3003]
    replaying.rows._tell = told  # type: ignore[method-assign]
    assert replaying.draw({5: 3, 0: 4}, {}) == [1003, 7]
    assert replaying.draw({2: 5, 7: 1}, {7: 4}) == [4102, 1004]
    assert replaying.rooms.made == [(4, 4), (4, 8), (2, 8)]
    assert len(replaying.rooms.shared) == 0


def test_a_row_that_starts_anew_is_told() -> None:
    replaying = Replaying.of(4)
    assert replaying.draw({0: 1, 1: 1}, {0: 5, 1: 6}) == [1005, 1006]
    assert replaying.draw({0: 1, 1: 2}, {0: 8}) == [1008, 3006], "row 0 belongs to another request"
    replaying.rows.forget()
    assert replaying.draw({0: 2, 1: 3}, {0: 1, 1: 2}) == [2001, 3002]


def test_pages_are_told_as_the_tables_are_then() -> None:
    tables = PageTable(2, 3, 9)
    rows = ResidentRows(tables, 2, 3, torch.device("cpu"))
    step = DecodingRows((RowId(1),), np.array([0]), {RowId(1): 1}, (), 16)
    for pool, first, pages in ((0, 2, (7, 8)), (1, 0, (5,)), (0, 3, (4, 9))):
        update = PageUpdate(RowId(1), PoolId(pool), first, tuple(map(PageId, pages)))
        tables.write(PoolId(pool), 1, first, update.pages)
        rows.write_pages([update])
    rows.prepare(step)
    for pool in range(2):
        assert rows.on_device(1).tables[pool][:3].tolist() == tables.table(PoolId(pool)).tolist()


def test_pages_that_no_recorded_step_asks_for_are_not_remembered_one_by_one() -> None:
    """A worker may compute other steps for days, or none may be recorded any more."""
    tables = PageTable(2, 3, 9)
    rows = ResidentRows(tables, 2, 3, torch.device("cpu"))
    most = 0
    for number in range(10_000):
        update = PageUpdate(RowId(number % 3), PoolId(number % 2), number % 9, (PageId(number),))
        tables.write(update.pool, update.row, update.first_index, update.pages)
        rows.write_pages([update])
        most = max(most, len(rows._new_pages))
    assert 1000 < most < 5000
    rows.prepare(DecodingRows((RowId(1),), np.array([0]), {RowId(1): 1}, (), 16))
    for pool in range(2):
        assert rows.on_device(1).tables[pool][:3].tolist() == tables.table(PoolId(pool)).tolist()
    assert not rows._has_new_pages


@pytest.mark.parametrize("part", ["rules", "pages", "positions"])
def test_what_was_lost_on_its_way_is_told_again(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a failed step was to tell is taken for known: another request's pages or rules would be used."""
    tables = PageTable(1, 3, 9)
    rows = ResidentRows(tables, 1, 3, torch.device("cpu"))
    rules = packed_rules(SamplingParams(max_tokens=9, seed=5, temperature=0.5), 2, WayToDraw.FREE, VOCAB)
    update = PageUpdate(RowId(1), PoolId(0), 2, (PageId(7), PageId(8)))
    rows.open(RowId(1), rules)
    tables.write(PoolId(0), 1, 2, update.pages)
    rows.write_pages([update])
    step = DecodingRows((RowId(1),), np.array([4]), {RowId(1): 1}, (), 16)
    with monkeypatch.context() as broken:
        broken.setattr(rows, "_tell", lambda changes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rows.prepare(step)
    rows.forget()
    rows.prepare(step)
    found = {"rules": rows.rules[1], "pages": rows.on_device(1).tables[0][1], "positions": rows.positions[1:2]}[part]
    want = {"rules": rules, "pages": tables.table(PoolId(0))[1], "positions": np.array([4])}[part]
    assert found.tolist() == want.tolist()


def test_a_step_that_needs_more_room_is_recorded_again() -> None:
    _, graphs, _, rooms, recorder = Replaying.of(4)
    for position in (3, 3, 4, 7, 100, 3):
        hidden = graphs.forward(inputs_of([1, 1], [position, 0]))
        assert hidden is not None
        assert hidden.normed[:, 0].tolist() == [1000 * position + 1, 1]
    assert rooms.made == [(2, 4), (2, 8), (2, 128)]
    assert recorder.num_asked == 3


def test_other_steps_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, graphs, _, rooms, _ = Replaying.of(32)
    fitting = inputs_of([1, 2], [5, 6])
    prompt = Batch((Query(0, 5, 2),), 16)
    part = Wanted(fitting.batch, np.arange(1), (0, 1))
    for changes in ({"batch": prompt}, {"wanted": part}):
        fields = {name: getattr(fitting, name) for name in ("batch", "tokens", "positions", "wanted", "unread")}
        assert graphs.forward(StepInputs(**fields | changes)) is None
    assert graphs.forward(inputs_of([1] * 33, [1] * 33)) is None, "more tokens than are recorded"
    for _ in range(2):
        assert graphs.forward(inputs_of([1] * 17, [1], lens=[17])) is None, "more guesses than attention takes for few"
    assert [record.message for record in caplog.records] == [
        "CUDA graphs: none of steps that verify guesses (more than 15 guesses of a request)"
    ]
    assert not rooms.made


def test_guesses_are_not_verified_by_replays_where_recurrent_states_wait_for_them(
    tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = why_no_guesses(load_spec(tiny_models / "qwen3_5_text"))
    assert reason is not None and why_no_guesses(load_spec(tiny_models / "llama")) is None
    caplog.set_level(logging.INFO)
    with patch.object(Sums.spec, "recurrent", ("a layer",)):
        _, graphs, _, rooms, _ = Replaying.of(8)
        for _ in range(2):
            assert graphs.forward(inputs_of([1, 2, 3], [5, 6], lens=[2, 1])) is None
        assert not rooms.made
        assert graphs.forward(inputs_of([1, 2], [5, 6])) is not None
    assert [record.message for record in caplog.records] == [
        f"CUDA graphs: none of steps that verify guesses ({reason})"
    ]


def test_where_a_recording_fails_steps_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    drawing, graphs, rows, rooms, recorder = Replaying.of(4)
    assert graphs.forward(inputs_of([1], [1])) is not None
    assert rows.float_logits(VOCAB).shape == (4, VOCAB)
    recorder.error = RuntimeError("operation not permitted when stream is capturing\nand a page more")
    assert [graphs.forward(inputs_of([1] * n, [1] * n)) for n in (2, 2, 1, 4)] == [None] * 4
    assert (recorder.num_asked, len(rooms.made)) == (2, 2)
    one = DecodingRows((RowId(0),), np.array([1]), {RowId(0): 1}, (), 16)
    assert drawing.draw(one, DrawKind(WayToDraw.LARGEST)) is None
    assert recorder.num_asked == 2
    assert not rows._scratch.num_bytes
    assert [record.message for record in caplog.records] == [
        "CUDA graphs: none from now on; to record a step of 2 tokens ends with "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_row_past_its_pages_fails_the_step_alone() -> None:
    """The device would read the pages of the next row's line, and store keys there."""
    _, graphs, rows, _, recorder = Replaying.of(4)
    assert graphs.forward(inputs_of([1], [143])) is not None
    told = rows.last_drawn.clone()
    for starts, lens in (([144], ()), ([1, 144], ()), ([142], (3,))):
        with pytest.raises(StateError, match="in page tables for 144"):
            graphs.forward(inputs_of([1] * (sum(lens) or len(starts)), starts, None, lens))
    assert torch.equal(rows.last_drawn, told)
    assert graphs.forward(inputs_of([1], [143])) is not None
    assert recorder.num_asked == 1


def test_what_fails_on_the_host_ends_no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what was recorded with less room than there is since replayed behind it."""
    drawing, graphs, rows, rooms, recorder = Replaying.of(4)
    assert graphs.forward(inputs_of([1], [3])) is not None
    with monkeypatch.context() as broken:
        broken.setattr(given_rows, "write_over", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graphs.forward(inputs_of([1], [9]))
    assert rooms.made == [(1, 4), (1, 16)]
    assert graphs.forward(inputs_of([1], [9])) is not None
    assert (recorder.num_asked, len(rooms.made)) == (2, 2)
    runs, row = (Shared(0, 16, (0, 1)),), DecodingRows((RowId(0),), np.array([1]), {RowId(0): 1}, (), 16)
    kind = DrawKind(WayToDraw.LARGEST)
    assert drawing.draw(row, kind) is not None
    with monkeypatch.context() as broken:
        broken.setattr(Room, "share", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drawing.draw(replace(row, shared=runs), kind)
    rows.forget()
    assert drawing.draw(row, kind) is not None
    assert recorder.num_asked == 4


def test_steps_leave_what_they_compute_in_the_same_memory() -> None:
    """So no number of tokens has memory of its own for it."""
    _, graphs, _, _, _ = Replaying.of(8)
    found = [graphs.forward(inputs_of([1] * count, [1] * count)) for count in (1, 5, 8)]
    assert len({hidden.normed.data_ptr() for hidden in found if hidden is not None}) == 1


def test_a_recording_that_fails_leaves_rows_where_they_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have computed the step: another that reads the tokens drawn before it must find those."""
    replaying = Replaying.of(4)
    num_stored = replaying.rows.on_device(4).num_stored

    def fail(run: Callable[[], None]) -> Callable[[], None]:
        run()
        assert not num_stored.any()
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(replaying.recorder, "record", fail)
    drawn = replaying.rows.last_drawn.clone()
    assert replaying.draw({0: 3, 2: 5}, {}) is None
    assert replaying.rows.last_drawn.equal(drawn)
    assert replaying.rows.positions[[0, 2]].tolist() == [3, 5]
    assert num_stored.tolist() == [2]


# ---------------------------------------------------------------- draws on the device


@pytest.mark.parametrize("seed", [0, 1, 77, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_random_numbers_of_the_device_are_the_host_s(seed: int) -> None:
    rules = SamplingParams(max_tokens=9, seed=seed, temperature=1.0)
    packed = torch.from_numpy(packed_rules(rules, 10, WayToDraw.FREE, VOCAB))[None]
    for position in (10, 11, 12, 1000, 1 << 30):
        found = uniform_on_device(packed[:, :1], torch.tensor([[position - 10]]))
        assert found.item() == uniform(seed, position - 10)


class Drawing(NamedTuple):
    """Rows of all kinds, and what the sampler draws for them."""

    rules: list[SamplingParams]
    logits: Tensor
    want: list[int]

    @classmethod
    def of(cls, vocab_size: int, dtype: torch.dtype = torch.float32) -> "Drawing":
        limits = (
            (1.0, None, 0.0),
            (0.5, None, 0.0),
            (0.95, 3, 0.0),
            (1.0, None, 0.05),
            (0.999, 40, 1e-4),
            (1.0, 7, 0.0),
        )
        rules = []
        for seed in range(30):
            (top_p, top_k, min_p), temperature = limits[seed % 6], (0.0, 0.7, 2.0)[seed // 6 % 3]
            more = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
            rules.append(SamplingParams(max_tokens=9, seed=seed, **more))  # type: ignore[arg-type]
        logits = (
            torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 30)[:, None]
        )
        logits[::4] = logits[::4].round()  # ties
        logits = logits.to(dtype)
        rows = [SampleRow(row, place, None) for place, row in enumerate(rules)]
        return cls(rules, logits, [draw.token for draw in sample(logits.float(), rows)])

    def check(self, make: MakeDraws, device: str = "cpu") -> None:
        vocab_size = self.logits.shape[1]
        ways = [WayToDraw.of(params, vocab_size) for params in self.rules]
        assert set(ways) == set(WayToDraw)
        padded = torch.cat((self.logits, torch.full((30, 5), 1e4).to(self.logits)), 1)  # rows that fill up a share
        padded, lines = padded.to(device), torch.arange(30, device=device).flip(0)
        for way in WayToDraw:
            rows = ResidentRows(PageTable(1, 30, 1), 1, 30, torch.device(device))
            for line, (params, own) in enumerate(zip(self.rules, ways, strict=True)):
                assert own is not None
                rows.rules[29 - line] = torch.from_numpy(packed_rules(params, 5, own, vocab_size)).to(device)
                rows.positions[29 - line] = line + 4
            draws = torch.zeros((2, 30), dtype=torch.int64, device=device)
            make(rows, 30, vocab_size, DrawKind(way)).draw(padded, lines, draws)
            of_way = [index for index, own in enumerate(ways) if own is not None and own <= way]
            assert [int(draws[0, index]) for index in of_way] == [self.want[index] for index in of_way], way
            assert draws[1].all() and ((draws[0] >= 0) & (draws[0] < vocab_size)).all()
            assert rows.last_drawn[:30].flip(0).tolist() == draws[0].tolist()
            assert rows.positions[:30].flip(0).tolist() == list(range(5, 35))


@pytest.mark.parametrize("vocab_size", [16, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_by_rules_are_those_of_the_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    Drawing.of(vocab_size, dtype).check(TorchDraws)


def check_triton_draws(vocab_size: int, dtype: torch.dtype) -> None:
    Drawing.of(vocab_size, dtype).check(triton_draws())


def triton_draws() -> MakeDraws:
    found: MakeDraws = importlib.import_module("deltaserve.compute.executor.triton_draws").TritonDraws
    return found


@needs_triton
@pytest.mark.parametrize("vocab_size", [16, 9000])
def test_draws_by_kernels_are_those_of_the_sampler(process: KernelProcess, vocab_size: int) -> None:
    run_in(process, check_triton_draws, vocab_size, torch.float32)


def check_not_finite() -> None:
    logits = torch.randn(5, 9000)
    logits[1, 8999], logits[2, 9], logits[4, 0] = float("nan"), float("inf"), float("-inf")
    for way in WayToDraw:
        rows = ResidentRows(PageTable(1, 5, 1), 1, 5, torch.device("cpu"))
        params = SamplingParams(max_tokens=9, seed=1, temperature=0.8 if way else 0.0, top_p=0.9 if way == 2 else 1.0)
        rows.rules[:5] = torch.from_numpy(packed_rules(params, 0, way, 9000))
        draws = torch.zeros((2, 5), dtype=torch.int64)
        triton_draws()(rows, 5, 9000, DrawKind(way)).draw(logits, torch.arange(5), draws)
        assert draws[1].tolist() == [1, 0, 0, 1, 0], way
        assert ((draws[0] >= 0) & (draws[0] < 9000)).all()


@needs_triton
def test_kernels_tell_of_logits_that_are_not_finite(process: KernelProcess) -> None:
    run_in(process, check_not_finite)


def check_draws_share_memory() -> None:
    """Only one recorded step is computed at a time: logits that are scaled stand in one place for all of them."""
    rows = ResidentRows(PageTable(1, 6, 1), 1, 6, torch.device("cpu"))
    kinds = [DrawKind(way, is_adjusted) for way in WayToDraw for is_adjusted in (False, True)]
    made: list[Any] = [triton_draws()(rows, num_rows, VOCAB, kind) for num_rows in (1, 2, 4, 6) for kind in kinds]
    parts = [part for draws in made for part in (draws, draws._adjusting) if part is not None]
    kept = [tensor.untyped_storage() for part in parts for tensor in vars(part).values() if isinstance(tensor, Tensor)]
    num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    assert 6 * VOCAB * 4 <= num_bytes < 7 * VOCAB * 4


def check_compiled_once() -> None:
    """Kernels are the same for all numbers of rows: constants of four kernels are found."""
    module: Any = importlib.import_module("deltaserve.compute.executor.triton_draws")
    adjustments: Any = importlib.import_module("deltaserve.compute.executor.triton_adjustments")
    rows, kernels = ResidentRows(PageTable(1, 6, 1), 1, 6, torch.device("cpu")), Constants()
    of_draws = patch.multiple(module, look_at_chunks=kernels, choose=kernels, choose_limited=kernels)
    with of_draws, patch.object(adjustments, "adjust", kernels):
        for num_rows in (5, 6):
            lines, draws = torch.arange(num_rows), torch.zeros((2, num_rows), dtype=torch.int64)
            module.TritonDraws(rows, num_rows, VOCAB, DrawKind(WayToDraw.LIMITED, True)).draw(
                torch.zeros(6, VOCAB), lines, draws
            )
    assert len(kernels.found) == 4


@needs_triton
def test_kernels_that_draw_are_compiled_once(process: KernelProcess) -> None:
    run_in(process, check_compiled_once)


@needs_triton
def test_draws_of_all_numbers_of_rows_share_their_memory(process: KernelProcess) -> None:
    run_in(process, check_draws_share_memory)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 0},
        {"grammar": "root"},
        {"bad_words": ((1, 2),), "frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0), (1, 1.0))},
        {"logit_bias": ((1, 2 * LARGEST_BIAS),)},
        {"logit_bias": ((1, -2 * LARGEST_BIAS),)},
        {"logit_bias": tuple((token, 1.0) for token in range(MOST_BIASES + 1))},
        {"min_tokens": 1, "stop_token_ids": tuple(range(450, 550)), "logit_bias": tuple((t, 1.0) for t in range(450))},
    ],
    ids=["logprobs", "grammar", "bad words", "a token twice", "much more", "much less", "many biases", "many tokens"],
)
def test_what_needs_the_host_is_not_drawn_by_the_device(changes: dict[str, Any]) -> None:
    assert WayToDraw.of(SamplingParams(max_tokens=9, seed=1, **changes), VOCAB) is None


def test_where_all_tokens_are_banned_the_host_draws() -> None:
    rules = SamplingParams(max_tokens=9, seed=1, min_tokens=2, stop_token_ids=tuple(range(20)))
    assert WayToDraw.of(rules, 20) is None
    assert WayToDraw.of(rules, 21) is WayToDraw.FREE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((1, 1.0),)}, True),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, True),
        ({"min_tokens": 3}, False),
        ({"stop_token_ids": (1,), "top_p": 0.5}, False),
    ],
)
def test_which_rules_change_logits(changes: dict[str, Any], expected: bool) -> None:
    assert is_adjusted(SamplingParams(max_tokens=9, seed=1, **changes)) is expected
