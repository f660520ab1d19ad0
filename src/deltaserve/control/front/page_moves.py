"""Whether pages could move between two workers of one front, by what each says of itself.

The workers find out themselves, and know more (control/engine/fitting.py). But a front that took both would be ready,
and fail every request: it refuses the one that came later, in words that its operator can act on.
"""

from deltaserve.core.ids import Role
from deltaserve.core.wire.messages import Hello

_MOVING = frozenset({Role.PREFILL.value, Role.DECODE.value})


def page_differences(hello: Hello, other: Hello, name: str) -> list[str]:
    """What keeps pages from moving between a worker and the `other` one, called `name`; empty when nothing does."""
    if {hello.role, other.role} != _MOVING:
        return []
    here, there = hello.facts, other.facts
    found = []
    if here.page_size != there.page_size and (here.needs_equal_pages or there.needs_equal_pages):
        sizes = f"page size: here {here.page_size}, on {name} {there.page_size}"
        found.append(f"{sizes}; may differ only where every layer keeps all tokens")
    if not (here.has_staging and there.has_staging):
        for group in sorted(here.kv_dtypes.keys() & there.kv_dtypes.keys()):
            if here.kv_dtypes[group] != there.kv_dtypes[group]:
                dtypes = f"KV dtype of {group}: here {here.kv_dtypes[group]}, on {name} {there.kv_dtypes[group]}"
                found.append(f"{dtypes}; converted only in staging memory: --staging auto or on, on both sides")
    return found
