"""Pages as peers see them: addresses, bytes, checksums."""

import ctypes
import zlib

import torch

from deltaserve.base.ids import PageId, PoolId
from deltaserve.base.lifetime import Lifetime, Retention
from deltaserve.base.tokens import unpack_u32
from deltaserve.device.page_memory import DeviceMemory
from deltaserve.device.workspace import Workspace
from deltaserve.layout.dtype import DType
from deltaserve.layout.kv import KvLayout
from deltaserve.layout.spec import CacheSpec, PageGroup

SHORT = Retention(Lifetime.WINDOW, 128)
FULL = PageGroup("kv", num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
DRAFT = PageGroup("draft", num_layers=1, num_kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
WINDOW = PageGroup("window", num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP8_E4M3, retention=SHORT)
CACHE = CacheSpec(4, (FULL, WINDOW, DRAFT))
CPU = torch.device("cpu")


def memory() -> DeviceMemory:
    return DeviceMemory(CACHE, (10, 5), CPU)


def test_regions_name_real_memory() -> None:
    owner = memory()
    regions = owner.regions()
    assert [name for name, _ in regions] == ["kv", "window", "draft"]
    assert [region.id for _, region in regions] == [0, 1, 2]
    sizes = [KvLayout(group, 4).arena_bytes(pages) for group, pages in ((FULL, 10), (WINDOW, 5), (DRAFT, 10))]
    assert [region.num_bytes for _, region in regions] == sizes
    assert all(region.device == "cpu" for _, region in regions)
    ctypes.memset(regions[0][1].base, 7, 1)  # as a peer's write would
    assert owner.kv.page_arenas[0].bytes[0] == 7


def test_arena_has_the_layout_of_the_contract() -> None:
    """`[P, H, L, planes, S, D]`: one token's K and V land where layout/kv.py says."""
    arena = memory().kv.page_arenas[0]
    row = 6 * arena.rows_per_page + 1 * arena.rows_per_head
    values = torch.arange(8, dtype=torch.bfloat16)[None] + 1
    arena.scatter(2, 1, torch.tensor([row * 4 + 3]), values)  # page 6, head 1, layer 2, V, token 3
    view = arena.bytes.view(torch.bfloat16).view(10, *arena.layout.page_shape)
    assert torch.equal(view[6, 1, 2, 1, 3], values[0])
    assert view.count_nonzero() == 8
    for dtype in (torch.bfloat16, torch.float32):
        found = arena.gather(2, 1, torch.tensor([row]), torch.empty(1, 4 * 8, dtype=dtype), Workspace(CPU))
        assert torch.equal(found.view(4, 8)[3], values[0].to(dtype))


def test_checksums_cover_all_groups_of_a_pool() -> None:
    owner = memory()
    full, _, draft = owner.kv.arenas
    size, small = full.layout.page_bytes, draft.layout.page_bytes
    full.bytes.copy_(torch.randint(0, 256, full.bytes.shape, dtype=torch.uint8))
    draft.bytes.copy_(torch.randint(0, 256, draft.bytes.shape, dtype=torch.uint8))
    pages = (PageId(3), PageId(0), PageId(3))
    want = [
        zlib.crc32(
            full.bytes[p * size : (p + 1) * size].numpy().tobytes()
            + draft.bytes[p * small : (p + 1) * small].numpy().tobytes()
        )
        for p in pages
    ]
    assert list(unpack_u32(owner.checksums(PoolId(0), pages))) == want
    draft.bytes[3 * small] ^= 1
    assert unpack_u32(owner.checksums(PoolId(0), pages))[0] != want[0]
    assert owner.checksums(PoolId(1), ()) == b""
