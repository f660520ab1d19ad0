"""The entry of this launcher: see `ClusterKind`."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from deltaserve.core.findings import Level, Line
from deltaserve.launch.clusters.cluster_kinds import ClusterKind
from deltaserve.settings.config import Settings

_INSTALL = "pip install 'deltaserve[ray]', on every node"
_OF_A_CLIENT = "ray://"


def _is_installed() -> bool:
    """A folder called ray that is on the path is not the library."""
    try:
        return bool(version("ray")) and find_spec("ray") is not None
    except PackageNotFoundError:
        return False


def _refuse(settings: Settings) -> Iterator[str]:
    if not _is_installed():
        yield f"--cluster ray: Ray is not installed: {_INSTALL}"
    address = settings.cluster.address or ""
    if address.startswith(_OF_A_CLIENT):
        yield (
            f"--address {address[:80]}: the front has to run on a node of the cluster; start this there, "
            "`ray job submit` does so, and leave --address out"
        )


def _checks() -> Iterator[Line]:
    if _is_installed():
        yield Line(Level.OK, "library", f"ray {version('ray')} (--cluster ray)")
    else:
        yield Line(Level.OK, "library", f"ray is not installed; only --cluster ray needs it: {_INSTALL}")


KIND = ClusterKind(name="ray", refuse=_refuse, checks=_checks)
