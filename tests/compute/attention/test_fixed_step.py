"""Steps of fixed size: recorded once, each further step by the contents of buffers alone, with the bits of one that was
begun for it."""

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.fixed_step import RowsOnDevice, RowsToCome
from deltaserve.compute.attention.plan import TileSize, WorkTiles, plan_work
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.attention.triton.work_buffer import WorkBuffer, WorkCapacity
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.memory.page_table import Table
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import POOL, Shape, World
from tests.compute.attention.compiled_kernels import Constants
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in

SHAPE = Shape(num_layers=1, uses_triton=True)
ROWS = 6
LENS = (1, 2, 5, MAX_TILED_LEN)
"""Positions of rows with guesses; the last has pieces of several splits in long rows."""
FIELDS = ("positions", "first_parts", "part_starts", "write_pages", "tokens", "pages")


# ---------------------------------------------------------------- the buffer


def work_of(seed: int, num_rows: int) -> WorkTiles:
    draw = random.Random(seed)
    table = np.arange(8 * 80, dtype=np.int32).reshape(8, 80)
    queries = tuple(Query(row, draw.randint(64, 300), 1) for row in range(num_rows))
    shared = (Shared(0, 32, tuple(range(num_rows))),) if num_rows > 1 else ()
    return plan_work(Batch(queries, 16, shared), table, 4, 2, None, (TileSize(16, 32), TileSize(64, 32)))


def check_fields(buffer: WorkBuffer, work: WorkTiles) -> None:
    counts = (buffer.num_tokens, buffer.num_short, buffer.num_long)
    assert [int(count) for count in counts] == [len(work.positions), len(work.short), len(work.long)]
    assert buffer.short[: work.short.size].tolist() == work.short.reshape(-1).tolist()
    for name in FIELDS:
        values = getattr(work, name)
        assert getattr(buffer, name)[: len(values)].tolist() == values.tolist(), name
    beyond = buffer.part_starts[len(work.part_starts) :]
    assert set(beyond.tolist()) <= {int(work.part_starts[-1])}


def test_a_buffer_holds_one_step() -> None:
    for seed, num_rows in enumerate((8, 1, 5)):
        work = work_of(seed, num_rows)
        buffer = WorkBuffer.of(work, torch.device("cpu"))
        check_fields(buffer, work)
        assert buffer.capacity == WorkCapacity.of(work)
        assert not any((getattr(buffer, name).data_ptr() - buffer.num_tokens.data_ptr()) % 16 for name in FIELDS)


# ---------------------------------------------------------------- the work list made by the device


class OnDevice:
    """Rows where a device finds them, on this machine's; `room`: for tokens."""

    def __init__(self, table: Table, room: int, device: str = "cpu", most_len: int = MAX_TILED_LEN) -> None:
        self.table = table
        nobody = len(table)
        self.lines = torch.full((room,), nobody, dtype=torch.int64, device=device)
        self.positions = torch.zeros(nobody + 1, dtype=torch.int64, device=device)
        self.lens = torch.ones(room, dtype=torch.int64, device=device)
        self.num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros_like(self.num_rows)
        self.of_device = torch.zeros((nobody + 1, table.shape[1]), dtype=torch.int32, device=device)
        counts = self.num_rows, self.num_rows
        self.rows = RowsOnDevice(
            self.lines, *counts, self.positions, self.lens, self.num_tokens, most_len, (self.of_device,)
        )

    def put(self, batch: Batch) -> RowsToCome:
        """The rows of the batch are those of the step."""
        columns = ("line", "q_start", "q_len")
        lines, starts, lens = (np.array([getattr(q, name) for q in batch.queries]) for name in columns)
        self.lines.fill_(len(self.table))
        self.lines[: len(lines)] = torch.from_numpy(lines).to(self.lines.device)
        self.lens[: len(lines)] = torch.from_numpy(lens).to(self.lines.device)
        self.positions[torch.from_numpy(lines)] = torch.from_numpy(starts).to(self.lines.device)
        self.num_rows.fill_(len(lines))
        self.num_tokens.fill_(batch.num_tokens)
        self.of_device[: len(self.table)] = torch.from_numpy(self.table.copy()).to(self.lines.device)
        return RowsToCome(lines, starts + lens, lens, batch.shared, batch.split_tokens)


def check_row_work(group_size: int, window_len: int | None, most_len: int) -> None:
    """The same tiles as plan.py makes on the host, for steps of other rows one after the other."""
    row_work: Any = importlib.import_module("deltaserve.compute.attention.triton.row_work")
    table = np.random.default_rng(1).permutation(12 * 80).astype(np.int32).reshape(12, 80)
    size, page_size, split, room = TileSize(16, 32), 4, 16, 10 if most_len == 1 else 60
    rows = OnDevice(table, room, most_len=most_len)
    cut = row_work.RowCut(split, window_len, page_size, group_size, size)
    capacity = WorkCapacity(room, results=1200, short=1200, long=0, listed=room + 120, pages=0)
    work = row_work.RowWork(rows.rows, rows.of_device, cut, capacity)
    draw = random.Random(group_size)
    for num_rows in (10, 1, 7, 10):
        lens = {
            line: draw.choice((1, 16, 17, 64, 65, draw.randint(70, 318))) for line in draw.sample(range(12), num_rows)
        }
        longest = {line: draw.choice((1, 2, 5, most_len)) if most_len > 1 else 1 for line in lens}
        q_lens = {line: min(length, longest[line], room // num_rows) for line, length in lens.items()}
        queries = tuple(Query(line, length - q_lens[line], q_lens[line]) for line, length in lens.items())
        long, longer = ([i for i, q in enumerate(queries) if q.q_start >= least] for least in (32, 64))
        shared = tuple(Shared(s, e, tuple(r)) for s, e, r in ((0, 32, long), (32, 64, longer)) if len(r) > 1)
        batch = Batch(queries, split, shared)
        to_come = rows.put(batch)
        assert work.holds(to_come.ends, to_come.lens)
        work.share(row_work.shared_work(cut, room, to_come, table.shape[1]))
        work.plan()
        on_host = plan_work(
            replace(batch, shared=() if window_len else shared), table, page_size, group_size, window_len, (size, size)
        )
        num_tokens = batch.num_tokens
        need = int(on_host.part_starts[-1]), len(on_host.short)
        assert int(work.num_tokens) == num_tokens and int(work.num_short) == len(on_host.short)
        assert cut.need(to_come.ends, to_come.lens)[0] == need[0] and cut.need(to_come.ends, to_come.lens)[1] >= need[1]
        assert work.tokens[num_tokens:room].tolist() == list(range(num_tokens, room))
        assert tiles_read(
            work.short[: on_host.short.size].numpy(), work.tokens.numpy(), rows.of_device.numpy()
        ) == tiles_read(on_host.short.reshape(-1), on_host.tokens, on_host.pages.reshape(num_rows, -1))
        assert work.part_starts.tolist() == [*on_host.part_starts, *[on_host.part_starts[-1]] * (room - num_tokens)]
        for name in ("positions", "first_parts", "write_pages"):
            assert getattr(work, name)[:num_tokens].tolist() == getattr(on_host, name).tolist(), name


def tiles_read(tiles: Any, tokens: Any, pages: Any) -> list[tuple[Any, ...]]:
    """Each tile's tokens, rows, keys and partial result, and the pages of those keys; in any order."""
    width, found = pages.shape[1], []
    for first_token, first_row, num_rows, block, low, end, line, part in tiles.reshape(-1, 8).tolist():
        of_keys = pages.reshape(-1)[line + low // 4 : line + (end - 1) // 4 + 1].tolist()
        assert line % width == 0
        found.append((tokens[first_token], first_row, num_rows, block, low, end, part, *of_keys))
    return sorted(found)


@needs_triton
@pytest.mark.parametrize("window_len", [None, 40, 7])
@pytest.mark.parametrize("group_size", [1, 4, 24])
@pytest.mark.parametrize("most_len", [1, MAX_TILED_LEN])
def test_the_device_makes_the_list_of_the_host(
    process: KernelProcess, group_size: int, window_len: int | None, most_len: int
) -> None:
    run_in(process, check_row_work, group_size, window_len, most_len)


def check_planning_is_compiled_once() -> None:
    """The kernel is the same for numbers of rows with the same next power of two."""
    row_work: Any = importlib.import_module("deltaserve.compute.attention.triton.row_work")
    kernel, cut = Constants(), row_work.RowCut(16, None, 4, 2, TileSize(16, 32))
    with patch.object(row_work, "plan_rows", kernel):
        for num_rows in (5, 6):
            rows = OnDevice(np.zeros((12, 80), np.int32), num_rows)
            capacity = WorkCapacity(num_rows, results=40, short=80, long=0, listed=16, pages=0)
            row_work.RowWork(rows.rows, rows.of_device, cut, capacity).plan()
    assert len(kernel.found) == 1


@needs_triton
def test_planning_is_compiled_once(process: KernelProcess) -> None:
    run_in(process, check_planning_is_compiled_once)


def test_rows_share_without_gaps_from_the_root() -> None:
    row_work: Any = importlib.import_module("deltaserve.compute.attention.triton.row_work")
    cut = row_work.RowCut(16, None, 4, 2, TileSize(16, 32))
    runs = (Shared(0, 32, (0, 1)), Shared(32, 64, (0, 1, 2)), Shared(64, 80, (0,)))
    rows = RowsToCome(np.array([5, 3, 4]), np.full(3, 90), np.ones(3, np.int64), runs, 16)
    found = row_work.shared_work(cut, 4, rows, 10)
    assert found.private_from.tolist() == [4, 4, 0] and found.num_tokens == 64
    assert found.tokens.tolist() == [0, 1, 0, 1]
    assert [tile[7] for tile in found.tiles.tolist()] == [0, 1, 2, 3]
    assert {tile[6] for tile in found.tiles.tolist()} == {50}


# ---------------------------------------------------------------- the tape bites


def check_tape() -> None:
    numbers, of_host, found = torch.arange(4), [10], torch.zeros(4, dtype=torch.int64)

    def run() -> None:
        found.copy_((numbers + of_host[0]).view(2, 2).flatten())

    replay = StepTape().record(run)
    numbers += 1
    of_host[0] = 1000
    replay()
    assert found.tolist() == [11, 12, 13, 14]
    check_spoiling()
    waiting: tuple[Callable[[], Any], ...] = (
        found[0].item,
        found.nonzero,
        lambda: found[found > 12],
        lambda: torch.tensor([1]),
    )
    for waits in waiting:
        with pytest.raises(RuntimeError, match="in a step that is recorded"):
            StepTape().record(waits)


def check_spoiling() -> None:
    """What one made is valid until another one is replayed; what they were given stays."""
    numbers, made, tape = torch.arange(4), list[Tensor](), StepTape()
    replays = [tape.record(lambda: made.append(numbers * 2)) for _ in range(2)]
    for replay in replays:
        replay()
    assert made[0].tolist() == [-1] * 4 and made[1].tolist() == [0, 2, 4, 6] and numbers.tolist() == [0, 1, 2, 3]


@needs_triton
def test_a_tape_keeps_what_is_no_memory_and_refuses_to_wait(process: KernelProcess) -> None:
    run_in(process, check_tape)


# ---------------------------------------------------------------- steps by Triton's kernels


class FixedWorld(World):
    """A world of rows that compute one position or a few: by `begin_step`, and by what was recorded of another step."""

    def values(self, batch: Batch) -> list[Tensor]:
        """Values of each plane [T, H, D] of the step's own tokens."""
        return list(torch.cat([self.kv[q.line][0, :, q.q_start : q.q_end] for q in batch.queries], 1))

    def decoding(self, lens: Sequence[int], rows: Sequence[int], q_lens: Sequence[int] = (1,) * ROWS) -> Batch:
        queries = tuple(Query(row, lens[row] - q_lens[row], q_lens[row]) for row in rows)
        return Batch(queries, self.shape.split_tokens)


def spoil(work: Any) -> None:
    """Everything that the device makes anew in each step."""
    for field in (work.num_short, work.positions, work.first_parts, work.part_starts, work.write_pages):
        field.fill_(1 << 20)


class Recorded:
    """One step of ROWS rows of at most `most_len` positions, whatever these are, on one layer."""

    def __init__(
        self, world: World, batch: Batch, sinks: Tensor | None, recorder: StepRecorder, most_len: int = 1
    ) -> None:
        kernels = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
        backend = world.backend
        assert isinstance(backend, kernels.TritonAttention)
        self.world, self.sinks = world, sinks
        room = ROWS * most_len
        self.rows = OnDevice(world.tables.table(POOL), room, world.shape.device, most_len)
        self.step = backend.fixed_step(self.rows.rows, self.rows.put(batch))
        num_planes = world.pool.page_arenas[0].layout.group.planes
        self.q, self.out = world.random_q(room), torch.empty(0)
        planes = (room, world.shape.kv_heads, world.shape.head_dim)
        self.planes = [torch.randn(planes).to(self.q) for _ in range(num_planes)]
        self.replay = recorder.record(self._run)

    def _run(self) -> None:
        self.step.plan()
        (attention,) = self.step.attention
        attention.write_kv(0, *self.planes)
        self.out = attention.attend(0, self.q, self.world.shape.head_dim**-0.5, self.sinks)

    def attend(self, batch: Batch, planes: Sequence[Tensor], q: Tensor) -> Tensor:
        """[T, Hq, Dv]. Tokens that the step does not have are given NaN, and must write nothing and get 0."""
        to_come = self.rows.put(batch)
        assert self.step.holds(to_come.ends, to_come.lens) and self.step.share(to_come)
        spoil(self.step.attention[0].work)
        num_tokens = batch.num_tokens
        for target, values in zip((self.q, *self.planes), (q, *planes), strict=True):
            target.fill_(float("nan"))
            target[:num_tokens] = values
        table = self.world.tables.table(POOL)
        kept = table.copy()
        table.fill(self.world.pool.num_pages[0] - 1)  # who reads it now reads what another step will find there
        self.replay()
        table[:] = kept
        assert self.out[num_tokens:].eq(0).all()
        return self.out[:num_tokens].clone()


def check_on_tape(shape: Shape, sinks: Tensor | None = None, q_lens: Sequence[int] = (1,)) -> None:
    check_recorded(shape, StepTape(), sinks, q_lens)


def check_recorded(
    shape: Shape, recorder: StepRecorder, sinks: Tensor | None = None, q_lens: Sequence[int] = (1,)
) -> None:
    """Steps of other rows, lengths, pages and shared runs than that which was recorded; and fewer of them. `q_lens`:
    positions that a row may compute, the most last."""
    common = (0, 192, 128, 192, 192, 64)
    most = (260, 255, 190, 333, 230, 222)
    world = FixedWorld(shape, most, common)
    world.fill((1,) * len(most))
    recorded = Recorded(world, world.decoding(most, range(6), [q_lens[-1]] * ROWS), sinks, recorder, q_lens[-1])
    draw, memory = random.Random(1), world.pool.page_arenas[0].bytes
    for num_rows in (5, 1, 6):
        rows = draw.sample(range(6), num_rows)
        lens = [draw.randint(max(1, common[row]) + q_lens[-1], most[row]) for row in range(6)]
        private = world.decoding(lens, rows, [draw.choice(q_lens) for _ in range(6)])
        readers = tuple(
            place
            for place, query in enumerate(private.queries)
            if query.q_start >= 128 and (query.line == 0 or common[query.line] >= 128)
        )
        runs = [(), (Shared(0, 128, readers),)] if len(readers) > 1 else [()]
        q, planes = world.random_q(private.num_tokens), world.values(private)
        step = world.backend.begin_step(private)[0]
        step.write_kv(0, *planes)
        want = step.attend(0, q, shape.head_dim**-0.5, sinks)
        after = memory.clone()
        for run in runs:
            batch = replace(private, shared=run)
            assert torch.equal(recorded.attend(batch, planes, q), want), (rows, lens, run)
            assert torch.equal(memory, after)


@needs_triton
@pytest.mark.parametrize("window_len", [None, 70])
def test_what_was_recorded_of_one_step_computes_others_to_the_bit(
    process: KernelProcess, window_len: int | None
) -> None:
    run_in(process, check_on_tape, replace(SHAPE, window_len=window_len), torch.tensor([-2.0, 0.5, 3.0, 30.0]))


@needs_triton
@pytest.mark.parametrize("window_len", [None, 70])
def test_rows_of_a_few_positions(process: KernelProcess, window_len: int | None) -> None:
    shape = replace(SHAPE, kv_heads=1, group_size=3, window_len=window_len)
    run_in(process, check_on_tape, shape, torch.tensor([-2.0, 0.5, 3.0]), LENS)


@needs_triton
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(DType.BFLOAT16, DType.BFLOAT16), (DType.FLOAT32, DType.FP8_E4M3)])
def test_over_dtypes(process: KernelProcess, dtype: DType, kv_dtype: DType) -> None:
    run_in(process, check_on_tape, replace(SHAPE, kv_heads=1, dtype=dtype, kv_dtype=kv_dtype))


@needs_triton
def test_over_latents(process: KernelProcess) -> None:
    run_in(process, check_on_tape, Shape(16, 64, 1, 1, 4, 40, latent_dim=32, uses_triton=True), None, LENS)


def check_room(shape: Shape) -> None:
    lens = (40, 30, 600, 20)
    world = FixedWorld(shape, lens)
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
    backend: Any = world.backend
    table = world.tables.table(POOL)
    small, large = OnDevice(table, 3, most_len=1), OnDevice(table, 3, most_len=1)
    with patch.object(kernels, "_LEAST_ROOM", 8):
        step = backend.fixed_step(small.rows, small.put(world.decoding(lens, (0, 1))))
        larger = backend.fixed_step(large.rows, large.put(world.decoding(lens, (2, 1, 0))))
    fitting, more = small.put(world.decoding(lens, (1, 3, 0))), small.put(world.decoding(lens, (0, 1, 2)))
    assert step.holds(fitting.ends, fitting.lens)
    assert not step.holds(more.ends, more.lens)  # 19 splits and more
    assert not step.holds(fitting.ends, np.array([1, 1, 8])), "as many results for each of its positions"
    runs = tuple(Shared(32 * i, 32 * i + 32, (0, 1, 2)) for i in range(3))
    to_come = small.put(world.decoding((600,) * 4, (0, 1, 2)))
    assert step.share(replace(to_come, shared=runs[:2]))
    assert step.shared_tokens == 128
    assert not step.share(replace(to_come, shared=runs))
    assert step.shared_tokens == 128, "what does not fit changes nothing"
    assert larger.attention[0].work.capacity == WorkCapacity(3, results=32, short=32, long=0, listed=11, pages=0)
    with patch.object(kernels, "_LEAST_ROOM", 8):
        wide = step.widened(large.put(world.decoding(lens, (2, 1, 0))))
        sharing = larger.widened(replace(to_come, shared=runs))
        few = sharing.widened(fitting).attention[0].work.capacity
    assert wide.holds(more.ends, more.lens) and sharing.holds(more.ends, more.lens)
    assert sharing.attention[0].work.capacity.listed > wide.attention[0].work.capacity.listed == 11
    assert few == sharing.attention[0].work.capacity, "what alternates is recorded once more, not each time"
    assert backend.max_keys >= max(lens)


@needs_triton
def test_a_step_that_needs_more_room_is_told(process: KernelProcess) -> None:
    run_in(process, check_room, replace(SHAPE, group_size=1, kv_heads=1))
