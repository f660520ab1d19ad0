"""CacheSpec: groups, their pools, and the pages a length needs."""

import pytest

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention


def group(name: str, retention: Retention) -> PageGroup:
    return PageGroup(name, num_layers=1, num_kv_heads=1, head_dim=8, dtype=DType.BFLOAT16, retention=retention)


SHORT, LONG = Retention(Lifetime.WINDOW, 128), Retention(Lifetime.WINDOW, 4096)
FULL, WINDOW, DRAFT = group("full", KEEP_ALL), group("window", SHORT), group("draft", KEEP_ALL)


def test_groups_of_equal_retention_share_a_pool() -> None:
    spec = CacheSpec(16, (FULL, WINDOW, DRAFT))
    assert spec.num_pools == 2
    assert spec.pool_of(FULL) == spec.pool_of(DRAFT) == 0
    assert spec.pool_of(WINDOW) == 1
    assert [spec.groups_of(spec.pool_of(item)) for item in (FULL, WINDOW)] == [(FULL, DRAFT), (WINDOW,)]


def test_each_window_length_has_a_pool() -> None:
    other = group("long window", LONG)
    spec = CacheSpec(16, (FULL, WINDOW, other))
    assert spec.pools == (KEEP_ALL, SHORT, LONG)
    assert spec.groups_of(spec.pool_of(other)) == (other,)


def test_an_ordinary_model_has_one_pool() -> None:
    assert CacheSpec(16, (FULL,)).pools == (KEEP_ALL,)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_are_rounded_up(num_tokens: int, num_pages: int) -> None:
    assert CacheSpec(16, (FULL,)).num_pages(num_tokens) == num_pages


def test_every_dtype_has_a_size() -> None:
    assert {dtype.value: dtype.itemsize for dtype in DType} == {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "fp8_e4m3": 1,
    }
