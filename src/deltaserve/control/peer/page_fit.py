"""Whether pages may move between two workers, by what each says of itself. What may differ, and what may not:

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

The two workers judge each other. A front judges them as well: it pairs workers of one revision only (revision.py), and
refuses who does not fit the others of its revision: if it took both it would be ready and fail every request.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from deltaserve.control.peer.revision import identity
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.keys import seed_check
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageTerms
from deltaserve.core.wire.messages import Facts, Hello

CHANGEABLE = frozenset({Role.PREFILL, Role.DECODE})
"""Roles that a worker may change between."""


def unfitting(compat: Mapping[str, str], cache: CacheSpec, facts: Facts, hello: Hello) -> list[str]:
    """What keeps pages from moving to or from the peer that says `hello`, both values named; empty when nothing does.

    `compat`, `facts`: as this worker announces them.
    """
    differences = unequal_fields(compat, hello.compat)
    if compat.get("transport") != hello.compat.get("transport"):
        differences.append("say which on both sides: --disaggregation-transfer-backend NAME")
    try:
        terms_of(cache, hello.facts)
    except ValueError as error:
        return [*differences, str(error)]
    return differences + page_differences(facts, hello.facts)


def may_write_back(decode: Facts, prefill: Facts) -> bool:
    """Whether pages that decode has computed may stand in prefill's tree: others get them from there.

    They are what prefill would have computed: no element has been rounded, and nothing is left out that a draft head of
    prefill keeps.
    """
    return prefill.kv_dtypes.items() <= decode.kv_dtypes.items()


@dataclass(frozen=True, slots=True)
class FrontTerms:
    """What a front and its workers must have in common."""

    secret: bytes
    tokenizer: str
    """Hash of tokenizer, chat template and end tokens (model/fingerprint.py): the front makes tokens of prompts, and
    text of answers."""


def misfit(hello: Hello, configured: Role, ours: FrontTerms, others: Mapping[PeerName, Hello]) -> str | None:
    """Why a front cannot use the worker that says `hello`, beside `others` of its revision; None: it can.

    `configured`: what it is to have been started as.
    """
    its_own = hello.configured_role or hello.role
    if its_own != configured.value or not _may_become(configured, hello.role):
        says = hello.role if its_own == configured.value else its_own
        return f"role: configured {configured.value}, it says {says[:80]}"
    if hello.facts.page_size <= 0:
        return f"page size {hello.facts.page_size} is not above 0"
    fingerprint = hello.compat.get("fingerprint")
    if not fingerprint:
        return "it does not say which model it has (fingerprint: absent)"
    check, wanted = hello.facts.keys_seed_check, seed_check(ours.secret, fingerprint)
    if check and check != wanted:
        return f"cluster secret: ours {wanted.hex()[:8]}, theirs {check.hex()[:8]} (hashes)"
    if (theirs := hello.compat.get("tokenizer", "")) != ours.tokenizer:
        hashes = f"on this front {ours.tokenizer[:12] or '(absent)'}, there {theirs[:12] or '(absent)'} (hashes)"
        return f"tokenizer, chat template or end tokens: {hashes}; it needs a router of its own"
    for name, other in others.items():
        if {hello.role, other.role} == {role.value for role in CHANGEABLE}:  # between these pages move
            differences = page_differences(hello.facts, other.facts, ("here", f"on {name}"))
            if differences:
                return does_not_fit(name, differences)
    return None


def does_not_fit(name: PeerName, differences: list[str]) -> str:
    return f"does not fit {name}: {'; '.join(differences)[:1000]}"


def other_revision(hello: Hello, name: PeerName, other: Hello) -> str:
    """Why the worker that says `hello` serves nothing together with `name`, both values named."""
    return does_not_fit(name, unequal_fields(identity(hello), identity(other), ("here", f"on {name}")))


def _may_become(configured: Role, role: str) -> bool:
    """Whether a process that was started in one role may be found in another."""
    return role == configured.value or {configured.value, role} == {changeable.value for changeable in CHANGEABLE}


def page_differences(ours: Facts, theirs: Facts, sides: tuple[str, str] = ("ours", "theirs")) -> list[str]:
    """Page sizes and dtypes with which no pages move; `sides` are the words for the two workers."""
    here, there = sides
    found = []
    if ours.page_size != theirs.page_size and (ours.needs_equal_pages or theirs.needs_equal_pages):
        sizes = f"page size: {here} {ours.page_size}, {there} {theirs.page_size}"
        found.append(f"{sizes}; may differ only where every layer keeps all tokens")
    if ours.has_staging and theirs.has_staging:
        return found
    staging = zip(sides, (ours.has_staging, theirs.has_staging), strict=True)
    who = ", ".join(f"{side} {'has it' if has_it else 'has none'}" for side, has_it in staging)
    for group in sorted(ours.kv_dtypes.keys() & theirs.kv_dtypes.keys()):
        dtypes = ours.kv_dtypes[group], theirs.kv_dtypes[group]
        if dtypes[0] != dtypes[1]:
            differs = f"KV dtype of {group}: {here} {dtypes[0]}, {there} {dtypes[1]}"
            found.append(f"{differs}; converted only in staging memory: --staging auto or on, on both sides ({who})")
    return found


def unequal_fields(
    ours: Mapping[str, str], theirs: Mapping[str, str], sides: tuple[str, str] = ("ours", "theirs")
) -> list[str]:
    """Differences of two compat maps, each as `field: ours X, theirs Y`; empty when compatible."""
    fields = sorted(ours.keys() | theirs.keys())
    absent = "(absent)"
    return [
        f"{field}: {sides[0]} {ours.get(field, absent)}, {sides[1]} {theirs.get(field, absent)}"
        for field in fields
        if ours.get(field) != theirs.get(field)
    ]


def terms_of(ours: CacheSpec, facts: Facts) -> PageTerms:
    """Page size and dtypes of a peer's pages. Raises ValueError for values that no worker can have."""
    if facts.page_size <= 0:
        raise ValueError(f"page size: ours {ours.page_size}, theirs {facts.page_size}")
    dtypes = {group.name: group.dtype.value for group in ours.groups if not group.is_for_guesses} | facts.kv_dtypes
    theirs = (dtypes.get(group.name) for group in ours.groups)
    return PageTerms(facts.page_size, tuple(None if dtype is None else DType(dtype) for dtype in theirs))
