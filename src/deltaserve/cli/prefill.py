"""`deltaserve prefill MODEL`: one prefill worker, for `deltaserve router` to use."""

from deltaserve.base.config import Settings
from deltaserve.base.ids import Role
from deltaserve.cli.worker_command import rehearse_worker_command, run_worker_command


def run(settings: Settings) -> int:
    """See worker_command."""
    return run_worker_command(settings, Role.PREFILL)


def rehearse(settings: Settings) -> dict[str, str]:
    """See worker_command."""
    return rehearse_worker_command(settings, Role.PREFILL)
