"""What a launcher is known by: each has an entry (`ClusterKind`) in its folder, imported when it is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from deltaserve.core.branches import CLUSTERS
from deltaserve.core.files.branch_code import load_branch, load_half
from deltaserve.core.findings import Line
from deltaserve.settings.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKind:
    """One launcher, without its library."""

    name: str
    refuse: Callable[[Settings], Iterator[str]]
    """What stands in the way of `serve --cluster NAME`, a line each: a missing library, an address that is none."""
    checks: Callable[[], Iterator[Line]]
    """Findings of `deltaserve doctor`."""


class ClusterLauncher(Protocol):
    """The module that starts workers with that library."""

    def run(self, settings: Settings) -> int:
        """Serve until a stop signal; the exit code. Raises ConfigError."""
        ...

    def rehearse(self, settings: Settings) -> dict[str, str]:
        """What auto came to, by field. Raises ConfigError; no cluster is asked."""
        ...


def cluster_kind(name: str) -> ClusterKind:
    """The launcher of this name, one of core/branches.py."""
    kind: ClusterKind = load_branch(CLUSTERS[name]).KIND
    return kind


def cluster_kinds() -> Iterator[ClusterKind]:
    """All that there are."""
    return map(cluster_kind, CLUSTERS)


def load_launcher(name: str) -> ClusterLauncher:
    """The module that does it. Imports its library."""
    launcher: ClusterLauncher = load_half(CLUSTERS[name], "serve")  # type: ignore[assignment]
    return launcher
