"""What may differ between two workers that move pages, and the words for what may not."""

import itertools
from dataclasses import replace

import pytest

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.parts import facts_of
from deltaserve.control.peer.page_fit import terms_of, unequal_fields, unfitting
from deltaserve.core.ids import Role
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup, PageTerms
from deltaserve.core.wire.messages import Facts, Hello
from deltaserve.sim.cluster import Shape, worker_config
from tests.control.engine.duo import DECODE, PREFILL


def config(
    page_size: int = 16, dtype: DType = DType.FLOAT32, num_pools: int = 1, staging: bool = True
) -> InstanceConfig:
    whole = worker_config(Shape(page_size=page_size, num_pools=num_pools), PREFILL, Role.PREFILL, 1)
    terms = PageTerms(page_size, tuple(dtype for _ in whole.cache.groups))
    return replace(whole, cache=whole.cache.under(terms), has_staging=staging)


def problems(ours: InstanceConfig, theirs: InstanceConfig) -> list[str]:
    theirs = replace(theirs, name=DECODE, role=Role.DECODE)
    return against(ours, Hello(role=theirs.role.value, compat=dict(theirs.compat), facts=facts_of(theirs)))


def against(ours: InstanceConfig, hello: Hello) -> list[str]:
    return unfitting(dict(ours.compat), ours.cache, facts_of(ours), hello)


def test_sizes_and_dtypes_may_differ() -> None:
    ours, theirs = config(16, DType.FLOAT32), config(64, DType.FP8_E4M3)
    assert problems(ours, theirs) == problems(theirs, ours) == []
    assert terms_of(ours.cache, facts_of(theirs)) == PageTerms(64, (DType.FP8_E4M3,))


def test_a_size_may_differ_without_staging() -> None:
    assert problems(config(16, staging=False), config(64)) == []


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (False, False)])
def test_dtypes_differ_only_with_staging_on_both_sides(ours: bool, theirs: bool) -> None:
    (words,) = problems(config(dtype=DType.FLOAT32, staging=ours), config(dtype=DType.BFLOAT16, staging=theirs))
    assert "ours float32, theirs bfloat16" in words
    assert "--staging" in words
    assert f"ours {'has it' if ours else 'has none'}, theirs {'has it' if theirs else 'has none'}" in words


def test_windows_keep_page_sizes_equal() -> None:
    """What a window needs of a page of the reader, a writer of smaller pages may have given up."""
    (words,) = problems(config(16, num_pools=2), config(64, num_pools=2))
    assert "page size: ours 16, theirs 64" in words
    assert problems(config(16, num_pools=2), config(16, num_pools=2)) == []


@pytest.mark.parametrize("facts", [Facts(page_size=0), Facts(page_size=-4)])
def test_no_page_size_is_none(facts: Facts) -> None:
    ours = config()
    (words,) = against(ours, Hello(role="decode", compat=dict(ours.compat), facts=facts))
    assert f"page size: ours 16, theirs {facts.page_size}" in words


def test_pages_move_in_one_way() -> None:
    ours, theirs = (replace(config(), compat=(("transport", name),)) for name in ("local", "nixl"))
    assert problems(ours, theirs) == [
        "transport: ours local, theirs nixl",
        "say which on both sides: --disaggregation-transfer-backend NAME",
    ]


def test_an_unknown_dtype_is_refused() -> None:
    ours = config()
    facts = Facts(page_size=16, kv_dtypes={ours.cache.groups[0].name: "int3"})
    (words,) = against(ours, Hello(role="decode", compat=dict(ours.compat), facts=facts))
    assert "int3" in words


def test_what_computed_the_pages_may_not_differ() -> None:
    other = replace(config(), compat=(("fingerprint", "another"),))
    assert problems(config(), other) == ["fingerprint: ours stamp model, theirs another"]


def test_a_draft_head_may_be_on_one_side_alone_or_be_another() -> None:
    ours = config()
    own = PageGroup("draft", 1, 1, 8, DType.FLOAT32, is_for_guesses=True)
    drafting = replace(ours, cache=CacheSpec(16, (*ours.cache.groups, own)))
    other = replace(ours, cache=CacheSpec(16, (*ours.cache.groups, replace(own, name="draft-0123"))))
    for one, two in itertools.permutations((ours, drafting, other), 2):
        assert problems(one, two) == []
        theirs = one.cache.under(terms_of(one.cache, facts_of(two)))
        assert theirs.groups == ours.cache.groups
    assert drafting.cache.under(terms_of(drafting.cache, facts_of(drafting))) == drafting.cache


def test_differences_name_field_and_both_values() -> None:
    ours = {"dtype": "bfloat16", "page_size": "64", "rope": "a"}
    theirs = {"dtype": "float16", "page_size": "64", "tokenizer": "x"}
    assert unequal_fields(ours, theirs) == [
        "dtype: ours bfloat16, theirs float16",
        "rope: ours a, theirs (absent)",
        "tokenizer: ours (absent), theirs x",
    ]
    assert unequal_fields(ours, dict(ours)) == []
