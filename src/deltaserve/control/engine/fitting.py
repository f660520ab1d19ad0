"""Whether pages may move between this worker and another one. What may differ, and what may not:

ranks                      any two numbers that divide the heads, or are divided by them (core/layout/copy_plan.py)
page size                  any two, where every page group keeps all tokens: the pages that a window or a state needs
                           on one side begin inside pages that the other side has given up
dtype of the KV            any two, where both sides have staging memory: elements are converted in it, no write does
                           that. A transport whose notifications prove nothing has none (control/transfer/endpoint.py)
sizes, rows, context       any: a request that is too large for one of them is refused
weights, their dtype       equal: KV of another model, or computed otherwise, is no KV of this one (`compat`)
page groups                equal in layers, heads, head size, planes and what they keep (`compat`); but that of a draft
                           head: where the other side has none of that name, nothing of it moves
transport, checksums       equal: both sides must mean the same by a write and by an announcement (`compat`)
"""

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.peer.table import unequal_fields
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageTerms
from deltaserve.core.wire.messages import Facts, Hello


def unfitting(config: InstanceConfig, hello: Hello) -> list[str]:
    """What keeps pages from moving, both values named; empty when nothing does."""
    differences = unequal_fields(dict(config.compat), dict(hello.compat))
    if dict(config.compat).get("transport") != hello.compat.get("transport"):
        differences.append("say which on both sides: --disaggregation-transfer-backend nixl")
    try:
        theirs = terms_of(config.cache, hello.facts)
    except ValueError as error:
        return [*differences, str(error)]
    if theirs.page_size != config.cache.page_size and not config.cache.keeps_all:
        sizes = f"ours {config.cache.page_size}, theirs {theirs.page_size}"
        differences.append(f"page size: {sizes}; may differ only where every layer keeps all tokens")
    has_staging = config.has_staging and hello.facts.has_staging
    for ours, dtype in zip(config.cache.groups, theirs.dtypes, strict=True):
        if dtype is not None and ours.dtype is not dtype and not has_staging:
            dtypes = f"{ours.name}: ours {ours.dtype.value}, theirs {dtype.value}"
            wanted = "converted only in staging memory: --staging auto or on, on both sides"
            differences.append(f"KV dtype of {dtypes}; {wanted} ({_without_staging(config, hello)})")
    return differences


def _without_staging(config: InstanceConfig, hello: Hello) -> str:
    sides = (("ours", config.has_staging), ("theirs", hello.facts.has_staging))
    return ", ".join(f"{side} {'has it' if has_it else 'has none'}" for side, has_it in sides)


def terms_of(ours: CacheSpec, facts: Facts) -> PageTerms:
    """Page size and dtypes of a peer's pages. Raises ValueError for values that no worker can have."""
    if facts.page_size <= 0:
        raise ValueError(f"page size: ours {ours.page_size}, theirs {facts.page_size}")
    dtypes = {group.name: group.dtype.value for group in ours.groups if not group.is_for_guesses} | facts.kv_dtypes
    theirs = (dtypes.get(group.name) for group in ours.groups)
    return PageTerms(facts.page_size, tuple(None if dtype is None else DType(dtype) for dtype in theirs))
