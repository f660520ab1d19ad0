"""`deltaserve prefill MODEL`: one prefill worker, for `deltaserve router` to use."""

from deltaserve.core.ids import Role
from deltaserve.launch.worker_command import rehearse_worker_command, run_worker_command
from deltaserve.settings.config import Settings


def run(settings: Settings) -> int:
    """Run one prefill worker: see worker_command."""
    return run_worker_command(settings, Role.PREFILL)


def rehearse(settings: Settings) -> dict[str, str]:
    """Check the settings of a prefill worker: see worker_command."""
    return rehearse_worker_command(settings, Role.PREFILL)
