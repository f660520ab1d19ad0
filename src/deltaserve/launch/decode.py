"""`deltaserve decode MODEL`: one decode worker, for `deltaserve router` to use, or with --http for another's."""

from deltaserve.core.ids import Role
from deltaserve.launch.http_worker import rehearse_http_worker, run_http_worker
from deltaserve.launch.worker_command import rehearse_worker_command, run_worker_command
from deltaserve.settings.config import Settings


def run(settings: Settings) -> int:
    """Run one decode worker: see worker_command and http_worker."""
    start = run_worker_command if settings.network.http is None else run_http_worker
    return start(settings, Role.DECODE)


def rehearse(settings: Settings) -> dict[str, str]:
    """Check the settings of a decode worker: see worker_command and http_worker."""
    try_out = rehearse_worker_command if settings.network.http is None else rehearse_http_worker
    return try_out(settings, Role.DECODE)
