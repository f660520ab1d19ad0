"""`deltaserve prefill|decode MODEL`: one worker for a `router`; this process becomes it."""

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from deltaserve.base.config import Settings
from deltaserve.base.config_rules import is_loopback
from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import Role
from deltaserve.cli.compose import Checkpoint, resolve_settings, worker_spec
from deltaserve.cli.secrets import read_cluster_key
from deltaserve.cli.serve import require_free_port
from deltaserve.engine.spec import worker_environment, write_spec


def run_worker_command(settings: Settings, role: Role) -> int:
    """Never returns when all is well: the process is replaced by the worker. Raises ConfigError."""
    if settings.security.cluster_key_file is None:
        raise ConfigError("--cluster-key-file: missing; the router and its workers must share one key")
    secret_path = Path(settings.security.cluster_key_file).resolve()
    read_cluster_key(secret_path)
    checkpoint = Checkpoint.open(settings.model.model_path, settings.model.json_model_override_args)
    resolved = resolve_settings(settings, checkpoint, 1)
    host, port = settings.network.host, settings.disaggregation.disaggregation_bootstrap_port
    require_free_port(host, port)
    name = f"{role.value}-{host}:{port}"  # as the router names it: by the address it dials
    spec = msgspec.structs.replace(
        worker_spec(name, role, settings, checkpoint, resolved, secret_path),
        host=host,
        port=port,
        curve=not is_loopback(host),
        transport_devices="lo" if is_loopback(host) else "all",
    )
    folder = Path(tempfile.mkdtemp(prefix="deltaserve-"))
    path = folder / "worker.json"
    write_spec(spec, path)
    print(f"deltaserve: {name}: loading {checkpoint.name}", file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "deltaserve.engine.worker", str(path)]
    os.execve(sys.executable, argv, {**os.environ, **worker_environment(spec)})
