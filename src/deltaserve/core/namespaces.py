"""How a tenant's namespace is narrowed by what its clients choose, and whose a narrowed one is."""

import re

from deltaserve.core.ids import Namespace

_NARROWED = re.compile("([0-9]{1,6}):")
"""How a narrowed one begins. A tenant's own has no colon (process/front/secrets.py)."""


def narrowed(namespace: Namespace, salt: str) -> Namespace:
    """The part of `namespace` that `salt` names. Both are told apart by a length in front: no collisions."""
    return Namespace(f"{len(namespace)}:{namespace}+{salt}")


def tenant_of(namespace: Namespace) -> Namespace:
    """The namespace that this one was narrowed from, however often: that of an API key."""
    while (head := _NARROWED.match(namespace)) is not None:
        namespace = Namespace(namespace[head.end() : head.end() + int(head[1])])
    return namespace
