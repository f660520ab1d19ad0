"""The file under the tree: pages come back byte for byte, and only right ones; what cannot be had is told at once."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from deltaserve.compute.memory.arena import Arena
from deltaserve.compute.memory.cache_file import CacheFile, DevicePages, HostPages, PoolPages
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.control.transfer.commands import SlotCopy
from deltaserve.control.transfer.tier_plane import TierError
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.keys import KEY_BYTES
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.lifetime import Lifetime, Retention

WINDOW = Retention(Lifetime.WINDOW, 9)
GROUPS = (
    PageGroup("kv", num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16),
    PageGroup("other", num_layers=1, num_kv_heads=2, head_dim=8, dtype=DType.FP8_E4M3),
    PageGroup("window", num_layers=2, num_kv_heads=1, head_dim=8, dtype=DType.BFLOAT16, retention=WINDOW),
)
SLOTS = (3, 2)
pytestmark = pytest.mark.parametrize("pages", [HostPages, DevicePages], ids=["in place", "by way of a buffer"])
ONE, OTHER = b"1" * KEY_BYTES, b"2" * KEY_BYTES
A, B = PageId(1), PageId(3)


@pytest.fixture
def kv() -> KvPool:
    pool = KvPool(CacheSpec(4, GROUPS), (4, 4), torch.device("cpu"))
    for arena in pool.arenas:
        arena.bytes.copy_(torch.randint(0, 256, arena.bytes.shape, dtype=torch.uint8))
    return pool


Pages = Callable[[Sequence[Arena]], PoolPages]


def at(slot: int, key: bytes, page: PageId, pool: int = 0) -> SlotCopy:
    return SlotCopy(PoolId(pool), page, slot, key)


def page(kv: KvPool, number: PageId, pool: int = 0) -> list[bytes]:
    arenas = [arena for arena in kv.arenas if kv.cache.pool_of(arena.layout.group) == pool]
    sizes = [(arena.bytes, arena.page_bytes) for arena in arenas]
    return [data[number * size : (number + 1) * size].numpy().tobytes() for data, size in sizes]


def test_pages_of_all_groups_come_back_byte_for_byte(kv: KvPool, tmp_path: Path, pages: Pages) -> None:
    file = CacheFile(tmp_path, SLOTS, kv, "model", pages)
    written, others = page(kv, A), page(kv, PageId(2))
    assert file.write(at(2, ONE, A)) == file.read(at(2, ONE, B))
    assert page(kv, B) == page(kv, A) == written
    assert page(kv, PageId(2)) == others
    assert not list(tmp_path.iterdir())
    file.close()


def test_pools_have_slots_of_their_own(kv: KvPool, tmp_path: Path, pages: Pages) -> None:
    file = CacheFile(tmp_path, SLOTS, kv, "model", pages)
    expected = page(kv, A), page(kv, A, 1)
    for pool, count in enumerate(SLOTS):
        for slot in range(count):
            file.write(at(slot, ONE, A, pool))
    for pool, count in enumerate(SLOTS):
        for slot in range(count):
            file.read(at(slot, ONE, PageId(slot), pool))
            assert page(kv, PageId(slot), pool) == expected[pool]
    file.close()


def test_what_a_slot_does_not_hold_is_not_believed(kv: KvPool, tmp_path: Path, pages: Pages) -> None:
    file = CacheFile(tmp_path, SLOTS, kv, "model", pages)
    file.write(at(0, ONE, A))
    for slot, key in ((0, OTHER), (1, ONE)):
        with pytest.raises(TierError, match="does not hold"):
            file.read(at(slot, key, B))
    os.pwrite(file._file, b"\0\1\2", 100)
    with pytest.raises(TierError, match="does not hold"):
        file.read(at(0, ONE, B))
    os.ftruncate(file._file, 120)
    with pytest.raises(TierError, match="of a slot were moved"):
        file.read(at(0, ONE, B))
    file.close()


def test_its_space_is_set_aside_at_the_start(kv: KvPool, tmp_path: Path, pages: Pages) -> None:
    file = CacheFile(tmp_path, (1, 1), kv, "model", pages)
    slot_bytes = file.write(at(0, ONE, A))
    file.close()
    many = (shutil.disk_usage(tmp_path).free + (1 << 30)) // slot_bytes
    with pytest.raises(ConfigError, match=r"--cache-dir .*: \d+ MiB: no space for it"):
        CacheFile(tmp_path, (many, 1), kv, "model", pages)
    with pytest.raises(ConfigError, match=r"--cache-dir .*/no: No such file"):
        CacheFile(tmp_path / "no", (1, 1), kv, "model", pages)
