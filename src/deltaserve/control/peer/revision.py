"""Which workers may serve one request together: those of one revision.

A revision is everything that must be equal on both sides before pages move between them, and before one may go on with
what another has begun: the checkpoint, how its weights are computed, the shape of its pages, transport, protocol. Two
checkpoints of one model are two revisions, and so is one checkpoint in two dtypes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from deltaserve.core.wire.messages import Hello

_DIGITS = 12


class Revision(NamedTuple):
    """One, as workers tell of it."""

    fingerprint: str
    """Fingerprint of the checkpoint: it seeds page keys."""
    digest: str
    """A short name of all that must be equal."""

    def __str__(self) -> str:
        return self.digest


def revision_of(hello: Hello) -> Revision:
    """The revision of the worker that says `hello`."""
    fields = sorted(identity(hello).items())
    body = b"".join(len(part).to_bytes(4, "little") + part for pair in fields for part in map(str.encode, pair))
    return Revision(hello.compat.get("fingerprint", ""), xxhash.xxh3_64_hexdigest(body)[:_DIGITS])


def identity(hello: Hello) -> Mapping[str, str]:
    """All that must be equal, by name."""
    return {"vocab_size": str(hello.facts.vocab_size), "protocol": str(hello.version), **hello.compat}
