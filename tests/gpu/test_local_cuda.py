"""The local transport over memory of a GPU: the conformance suite within a process, and the rows between processes."""

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from deltaserve.compute.memory.exported_memory import exported_zeros
from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.core.extents import Copy, Span
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import Sharing, TransportError, WriteState
from deltaserve.transports.cuda_driver import CudaDriver
from deltaserve.transports.local.memory_access import MemoryAccess, sealed_file
from tests.compute.attention.triton_process import needs_triton
from tests.transports.conformance import CHECKS
from tests.transports.local_rows import ROWS, LocalTroupe
from tests.transports.local_world import LocalWorld
from tests.transports.sides import REGION, World, finish, join, receive

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]
MIB = 1 << 20
CUDA = torch.device("cuda:0")


class DeviceBytes:
    """Memory of a GPU that is sliced, compared and assigned as a bytearray."""

    def __init__(self, data: torch.Tensor) -> None:
        """`data` [num_bytes] uint8"""
        self.data = data

    def __len__(self) -> int:
        return self.data.numel()

    def __getitem__(self, where: slice) -> bytes:
        return self.data[where].cpu().numpy().tobytes()

    def __setitem__(self, where: slice, value: Any) -> None:
        data = value.data if isinstance(value, DeviceBytes) else torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self.data[where].copy_(data)
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(cast(bytes, other))

    def __hash__(self) -> int:
        return id(self)

    def __bytes__(self) -> bytes:
        return self[:]


class CudaWorld(LocalWorld):
    """Sides of this process whose regions are allocations of one GPU."""

    device = "cuda:0"

    def __init__(self) -> None:
        module: Any = pytest.importorskip("deltaserve.transports.local.cuda_access")
        access: MemoryAccess = module.CudaAccess(self.device)
        super().__init__(lambda: access)

    def allocate(self, num_bytes: int) -> tuple[bytearray, int, int]:
        data, file = exported_zeros(num_bytes, CUDA)
        return cast(bytearray, DeviceBytes(data)), data.data_ptr(), file


@pytest.fixture
def world() -> Iterator[CudaWorld]:
    made = CudaWorld()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(world: CudaWorld, check: Callable[[World], None]) -> None:
    check(world)


@pytest.fixture(scope="module")
def troupe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTroupe]:
    made = LocalTroupe(tmp_path_factory.mktemp("sockets"), "cuda")
    yield made
    made.dismiss()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_row(troupe: LocalTroupe, row: Callable[[LocalTroupe], None]) -> None:
    """Two and three processes on one GPU, which are killed and stopped."""
    row(troupe)


LENGTHS = ([16], [1], [4096] * 3000, [256] * 70_000, [65536, 16, 1 << 21], [65537, 3, 70_001])


@pytest.mark.parametrize("lengths", LENGTHS, ids=["unit", "byte", "rows", "small rows", "aligned", "odd"])
def test_spans_of_any_length_and_alignment(world: CudaWorld, lengths: list[int]) -> None:
    """The first of each write begins at an odd address where a length is odd."""
    writer, reader = world.side("p", 32 * MIB), world.side("d", 32 * MIB)
    join(writer, reader)
    source, target = (cast(DeviceBytes, side.memory).data for side in (writer, reader))
    source.copy_(torch.randint(0, 256, (32 * MIB,), dtype=torch.uint8))
    wanted, copies, at = target.clone(), [], lengths[0] % 2
    for length in lengths:
        src, dst = at, 32 * MIB - at - length
        copies.append(Copy(Span(REGION, src, length), Span(REGION, dst, length)))
        wanted[dst : dst + length] = source[src : src + length]
        at += length
    torch.cuda.synchronize()
    write = writer.transport.write(reader.name, copies, b"there")
    assert finish(world, writer, write) is WriteState.DONE
    assert receive(world, reader) == [(writer.name, b"there")]
    assert torch.equal(target, wanted)


def test_copies_do_not_wait_for_the_stream_of_the_steps(world: CudaWorld) -> None:
    """A step that takes long stands in its stream; the write behind it is copied all the same."""
    writer, reader = world.side("p", MIB), world.side("d", MIB)
    join(writer, reader)
    step_over = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds
    step_over.record()
    write = writer.transport.write(reader.name, [Copy(Span(REGION, 0, MIB), Span(REGION, 0, MIB))], b"x")
    assert finish(world, writer, write) is WriteState.DONE
    assert not step_over.query()  # type: ignore[no-untyped-call]


def test_arenas_are_allocations_of_their_own() -> None:
    """What a peer maps is the arena alone, also where torch has memory to spare in its segments."""
    spare = torch.zeros(64 * MIB, dtype=torch.uint8, device=CUDA)
    del spare
    reserved = torch.cuda.memory_reserved()
    block = MemoryBlock(5 * MIB, CUDA, Sharing.READERS)
    region = block.region(RegionId(0))
    assert region.file is not None and not block.data.any()
    assert torch.cuda.memory_reserved() == reserved
    block.data[:] = 7
    torch.cuda.synchronize()
    mapping = CudaDriver(0).map(region.file, region.num_bytes)
    assert mapping.address != region.base
    mapping.close()


def test_memory_comes_back_when_it_is_dropped() -> None:
    """More than the card has, one after the other; what others of this card do does not matter."""
    total = torch.cuda.get_device_properties(CUDA).total_memory
    for _ in range(40):
        block = MemoryBlock(total // 32, CUDA, Sharing.READERS)
        assert block.file is not None
        del block


def test_descriptors_that_stand_for_less_or_for_no_gpu_memory_are_refused(world: CudaWorld) -> None:
    driver = CudaDriver(0)
    mapping, file = driver.allocate(2 * MIB)
    host_file = sealed_file(2 * MIB, "host")
    access: Any = world._make_access()
    for wrong, num_bytes in ((file, 64 * MIB), (host_file, 2 * MIB), (0, 2 * MIB)):
        with pytest.raises(TransportError, match="cuMem"):
            access.map(wrong, num_bytes)
    access.map(file, 2 * MIB).close()
    mapping.close()
    os.close(file)
    os.close(host_file)
