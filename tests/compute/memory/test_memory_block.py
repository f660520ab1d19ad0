"""Blocks are zeroed and aligned; what is shared can be mapped by another process, what is private cannot."""

import gc
import mmap
import os

import pytest
import torch

from deltaserve.compute.memory.memory_block import MemoryBlock
from deltaserve.core.ids import RegionId
from deltaserve.core.transport import Sharing

CPU = torch.device("cpu")
NUM_BYTES = 3 * mmap.PAGESIZE + 5


@pytest.mark.parametrize("sharing", Sharing)
def test_a_block_is_zeroed_and_begins_with_a_page(sharing: Sharing) -> None:
    block = MemoryBlock(NUM_BYTES, CPU, sharing)
    assert block.data.shape == (NUM_BYTES,)
    assert not block.data.any()
    region = block.region(RegionId(3))
    assert (region.id, region.num_bytes, region.device) == (3, NUM_BYTES, "cpu")
    assert region.base == block.data.data_ptr()
    assert region.base % mmap.PAGESIZE == 0


def test_a_shared_block_can_be_mapped_again() -> None:
    block = MemoryBlock(NUM_BYTES, CPU, Sharing.PROCESSES)
    file = block.region(RegionId(0)).file
    assert file is not None
    with mmap.mmap(file, NUM_BYTES) as again:
        again[7] = 200
        block.data[8] = 100
        assert (block.data[7].item(), again[8]) == (200, 100)


def test_the_file_is_closed_with_the_block() -> None:
    block = MemoryBlock(NUM_BYTES, CPU, Sharing.PROCESSES)
    file = block.file
    assert file is not None
    data = block.data
    del block
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(file)
    data[0] = 1


def test_a_private_block_has_no_file() -> None:
    assert MemoryBlock(NUM_BYTES, CPU).region(RegionId(0)).file is None
    assert MemoryBlock(0, CPU, Sharing.PROCESSES).file is None


def test_memory_of_a_device_comes_from_the_allocator_that_is_given() -> None:
    pool = torch.zeros(4 * NUM_BYTES, dtype=torch.uint8)
    asked: list[tuple[int, torch.device]] = []

    def from_pool(num_bytes: int, device: torch.device) -> torch.Tensor:
        asked.append((num_bytes, device))
        return pool[256 : 256 + num_bytes]

    device = torch.device("meta")  # any that is not the CPU
    block = MemoryBlock(NUM_BYTES, device, allocate=from_pool)
    assert asked == [(NUM_BYTES, device)]
    assert block.region(RegionId(1)).base == pool.data_ptr() + 256
    assert MemoryBlock(NUM_BYTES, CPU, allocate=from_pool).data.data_ptr() % mmap.PAGESIZE == 0
    assert len(asked) == 1


def test_an_allocator_that_gives_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="for 8 bytes"):
        MemoryBlock(8, torch.device("meta"), allocate=lambda num_bytes, device: torch.zeros(num_bytes + 1))


def test_readers_can_neither_write_nor_change_the_size() -> None:
    block = MemoryBlock(NUM_BYTES, CPU, Sharing.READERS)
    block.data[0] = 7
    assert block.file is not None
    theirs = os.open(f"/proc/self/fd/{block.file}", os.O_RDWR)
    for num_bytes in (NUM_BYTES // 2, 2 * NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(theirs, num_bytes)
    with pytest.raises(PermissionError):
        mmap.mmap(theirs, NUM_BYTES)
    with mmap.mmap(theirs, NUM_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        block.data[1] = 8
        assert mapping[:2] == b"\x07\x08"
    os.close(theirs)
