"""Slots of recurrent states: where their parts lie, and which of them a step reads and writes."""

import zlib

import numpy as np
import pytest
import torch

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.memory.state_arena import StateArena
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup, StateGroup
from deltaserve.core.tokens import unpack_u32
from tests.compute.attention.fixed_states_checks import check_fixed_states
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in

KEY, VALUE = HeadBlock(2, 2 * 3, 4), HeadBlock(4, 2 * 3, 5)
KV = PageGroup("kv", 1, 1, 8, DType.FLOAT32)
CONV = StateGroup("conv", 2, (KEY, KEY, VALUE), DType.BFLOAT16)
SSM = StateGroup("ssm", 2, (HeadBlock(4, 2, 20),), DType.FLOAT32)
CACHE = CacheSpec(4, (KV, CONV, SSM))
STATES = PoolId(1)
CPU = torch.device("cpu")
NUM_SLOTS = 6


def memory(shard: Shard = Shard()) -> DeviceMemory:
    return DeviceMemory(CACHE, (8, NUM_SLOTS), CPU, shard)


def test_each_group_is_a_region() -> None:
    owner = memory()
    sizes = [8 * 2 * 4 * 8 * 4, NUM_SLOTS * 2 * 3 * 2 * (2 * 4 + 2 * 4 + 4 * 5), NUM_SLOTS * 4 * 2 * 20 * 4]
    assert [(name, region.num_bytes) for name, region in owner.regions()] == list(
        zip(("kv", "conv", "ssm"), sizes, strict=True)
    )


def test_a_head_of_a_block_holds_its_layers_one_after_the_other() -> None:
    conv, _ = memory(Shard(1, 2)).kv.state_arenas  # q and k: one head of two; v: two of four
    q, k = (torch.full((1, 1, 3, 4), value) for value in (1.0, 2.0))
    v = torch.arange(30.0).view(1, 2, 3, 5)
    conv.store(1, torch.tensor([5]), (q, k, v))
    slot = conv.bytes.view(torch.bfloat16).view(NUM_SLOTS, -1)[5].float()
    heads = [slot[:24].view(2, 3, 4), slot[24:48].view(2, 3, 4), slot[48:78].view(2, 3, 5), slot[78:].view(2, 3, 5)]
    assert torch.equal(
        torch.cat([head[1].flatten() for head in heads]), torch.cat([q.flatten(), k.flatten(), v.flatten()])
    )
    assert not any(head[0].any() for head in heads)
    for found, of_block in zip(conv.load(1, torch.tensor([5])), (q, k, v), strict=True):
        assert torch.equal(found.float(), of_block)
    assert not conv.bytes.view(NUM_SLOTS, -1)[:5].any()


def test_checksums_cover_all_states_of_a_slot() -> None:
    owner = memory()
    conv, ssm = owner.kv.state_arenas
    for arena in (conv, ssm):
        arena.bytes.copy_(torch.randint(0, 256, arena.bytes.shape, dtype=torch.uint8))
    slots = [arena.bytes.view(NUM_SLOTS, -1)[4].numpy().tobytes() for arena in (conv, ssm)]
    assert unpack_u32(owner.checksums(STATES, (PageId(4),))) == (zlib.crc32(b"".join(slots)),)


# ---------------------------------------------------------------- a step


class Step:
    """Three rows with slots of their own."""

    def __init__(self) -> None:
        self.memory = memory()
        self.tables = PageTable(CACHE.num_pools, 3, 8)
        self.attention = TorchAttention(self.memory.kv, self.tables, (1,))
        for slot in range(NUM_SLOTS):
            self.ssm.store(0, torch.tensor([slot]), (torch.full((1, 4, 1, 20), float(slot)),))

    @property
    def ssm(self) -> StateArena:
        return self.memory.kv.state_arenas[1]

    def slot(self, line: int, index: int, slot: int) -> None:
        self.tables.write(STATES, line, index, (PageId(slot),))

    def content(self) -> list[float]:
        """Content of each slot: one value all over it."""
        (found,) = self.ssm.load(0, torch.arange(NUM_SLOTS))
        values = found.flatten(1)
        assert torch.equal(values.amin(1), values.amax(1))
        return [float(value) for value in values[:, 0]]


def test_a_query_goes_on_from_one_slot_and_leaves_another() -> None:
    step = Step()
    step.slot(0, 0, 3)  # positions 0 to 3: a checkpoint
    step.slot(0, 2, 4)
    step.slot(1, 1, 5)
    step.slot(2, 0, 1)
    queries = (Query(0, 4, 7), Query(1, 5, 1), Query(2, 0, 3))
    states = step.attention.begin_states(Batch(queries, 64))[1]
    assert states.queries == queries
    (loaded,) = states.load(0)
    assert [float(of_query.unique()) for of_query in loaded] == [3.0, 5.0, 0.0], "nothing of a slot at position 0"
    states.store(0, loaded + 10.0)
    assert step.content() == [0.0, 10.0, 2.0, 3.0, 13.0, 15.0], "what it went on from is as it was"


def test_what_a_slot_held_before_is_not_read_at_position_0() -> None:
    step = Step()
    step.ssm.bytes.fill_(0xFF)  # NaN
    step.slot(0, 1, 2)
    states = step.attention.begin_states(Batch((Query(0, 0, 8),), 64))
    assert [not block.any() for group in states for block in group.load(0)] == [True] * 4
    assert np.isfinite(states[1].load(1)[0].numpy()).all()


def check_on_tape(ssm: DType) -> None:
    check_fixed_states("cpu", StepTape(), ssm)


@needs_triton
@pytest.mark.parametrize("ssm", [DType.FLOAT32, DType.BFLOAT16])
def test_slots_that_the_device_finds_are_those_of_the_host(process: KernelProcess, ssm: DType) -> None:
    """Recorded once; nothing in it waits for the device, which the tape refuses."""
    run_in(process, check_on_tape, ssm)
