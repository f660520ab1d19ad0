"""The file under the cache of a worker on a GPU: pages come back byte for byte beside steps, and only right ones."""

from pathlib import Path

import pytest
import torch

from deltaserve.compute.memory.cache_file import CacheFile, DevicePages
from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.control.transfer.commands import SlotCopy
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda:0")
ONE, OTHER = b"1" * KEY_BYTES, b"2" * KEY_BYTES
NUM_PAGES = 64


def copy(slot: int, page: int, key: bytes = ONE) -> SlotCopy:
    return SlotCopy(PoolId(0), PageId(page), slot, key)


def test_pages_come_back_while_the_gpu_computes(tmp_path: Path) -> None:
    group = PageGroup("kv", num_layers=8, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    memory = DeviceMemory(CacheSpec(16, (group,)), (2 * NUM_PAGES,), CUDA)
    (arena,) = memory.kv.arenas
    pages = arena.bytes.view(2 * NUM_PAGES, arena.page_bytes)
    pages[:NUM_PAGES] = torch.randint(0, 256, (NUM_PAGES, arena.page_bytes), dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device=CUDA)
    main = torch.cuda.current_stream()
    memory.work_beside_steps()
    try:
        file = CacheFile(tmp_path, (NUM_PAGES,), memory.kv, "model")
        assert isinstance(file._pools[0].pages, DevicePages)
        with torch.cuda.stream(main):
            for _ in range(50):
                busy = busy @ busy
                busy /= busy.norm()
        for slot in range(NUM_PAGES):
            file.write(copy(slot, slot))
        for slot in range(NUM_PAGES):
            file.read(copy(slot, NUM_PAGES + slot))
        torch.cuda.synchronize()
        assert torch.equal(pages[:NUM_PAGES], pages[NUM_PAGES:])
        before = pages[NUM_PAGES].clone()
        with pytest.raises(TierError, match="does not hold"):
            file.read(copy(3, NUM_PAGES, OTHER))
        assert torch.equal(pages[NUM_PAGES], before), "nothing of a wrong slot reaches a page"
        file.close()
    finally:
        torch.cuda.set_stream(main)
