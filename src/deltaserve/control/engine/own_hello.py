"""What a worker says of itself in its Hellos, and what keeps pages from moving to or from who says another one."""

from collections.abc import Iterable

import xxhash

from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.checks import Refusal, are_pair
from deltaserve.control.peer.page_fit import terms_of, unfitting
from deltaserve.core.errors import FailReason
from deltaserve.core.layout.spec import PageTerms
from deltaserve.core.wire.messages import PROTOCOL_VERSION, Facts, Hello, RankEnd


class OwnHello:
    """One worker's."""

    def __init__(self, config: InstanceConfig, facts: Facts) -> None:
        self._config = config
        self._facts = facts
        self._compat = dict(config.compat)

    def hello(self, ends: tuple[RankEnd, ...], answered: Hello | None = None) -> Hello:
        configured = self._config.configured_role
        return Hello(
            role=self._config.role.value,
            compat=self._compat,
            facts=self._facts,
            transport=self._config.transport,
            ends=ends,
            answers=digest(answered.ends) if answered is not None else b"",
            configured_role=configured.value if configured is not None else "",
        )

    def terms_of(self, hello: Hello) -> PageTerms:
        """Page size and dtypes of a peer that was not refused."""
        return terms_of(self._config.cache, hello.facts)

    def refusal(self, hello: Hello) -> Refusal | None:
        """Why no pages move between us, however long one waits, with both values; NO_PEER: for its role alone."""
        ours = self._config.role
        differences = unfitting(self._compat, self._config.cache, self._facts, hello)
        if hello.version != PROTOCOL_VERSION:
            differences.append(f"protocol version: ours {PROTOCOL_VERSION}, theirs {hello.version}")
        reason = FailReason.INCOMPATIBLE if differences else FailReason.NO_PEER
        if not are_pair(ours, hello.role):
            differences.append(f"role: ours {ours.value}, theirs {hello.role[:80]!r}")
        return (reason, "; ".join(differences)) if differences else None


def digest(ends: Iterable[RankEnd]) -> bytes:
    """What a Hello is recognized by in its answer."""
    metadata = (len(end.metadata).to_bytes(4, "little") + end.metadata for end in ends)
    return xxhash.xxh3_64_digest(b"".join(metadata))
