"""`deltaserve router MODEL --workers LIST`: the front alone, for workers that somebody else starts."""

import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import Checkpoint
from deltaserve.launch.fronts import front_specs
from deltaserve.launch.process_limits import require_threads
from deltaserve.launch.restarts import RestartPolicy
from deltaserve.launch.serve import (
    FrontText,
    check_front,
    front_spec,
    parser_values,
    require_free_ports,
    speaker,
    tell_sampling,
)
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.front.front_process import run_front
from deltaserve.process.front.front_spec import FrontWorker, front_child, write_front_spec
from deltaserve.process.front.secrets import NO_CLUSTER_KEY, read_cluster_key
from deltaserve.settings.config import Settings
from deltaserve.settings.host_and_port import is_any, is_loopback
from deltaserve.settings.resolve import shared_auto_values
from deltaserve.settings.worker_list import parse_workers

WAITS_FOR_OTHERS = RestartPolicy(start_timeout_s=math.inf)
"""The policy of fronts whose workers are started by somebody else, at any time."""


def run(settings: Settings) -> int:
    """Route until a stop signal. Needs the model folder for its tokenizer, not for weights."""
    prepared = prepare_router(settings)
    require_free_ports(settings)
    front = front_spec(settings, prepared.checkpoint, prepared.secret_path)
    network = settings.network
    spec = msgspec.structs.replace(
        front,
        name=front_name(settings),
        workers=prepared.workers,
        workers_file=None if network.workers_file is None else os.path.abspath(network.workers_file),
        workers_dns=network.workers_dns or "",
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    require_threads(num_processes=settings.network.fronts, num_computing=0)
    tell = speaker(settings)
    for note in prepared.checkpoint.notes:
        tell(note)
    tell_sampling(prepared.text.sampling, tell)
    fronts = front_specs(spec, settings)
    with private_folder(settings.process.state_dir) as folder:
        if len(fronts) == 1:
            return int(run_front(write_front_spec(spec, folder), None))
        seen = [msgspec.structs.replace(each, log=msgspec.structs.replace(each.log, is_seen=True)) for each in fronts]
        options = SupervisorOptions(None, settings.process.shutdown_grace_s, restarts=WAITS_FOR_OTHERS)
        return int(Supervisor([front_child(each, folder) for each in seen], options, tell).run())


def front_name(settings: Settings) -> str:
    """Name of the front, the same after a restart, so that workers know whose requests are over; no other front listens
    there.

    Machines may share a name, where nobody gave them one; the address on which others reach this one is its own.
    """
    host, port = settings.network.host, settings.network.port
    return f"front-{socket.gethostname() if is_loopback(host) or is_any(host) else host}:{port}"


def rehearse(settings: Settings) -> dict[str, str]:
    """What auto came to, by field. Raises ConfigError as `run` does; whether ports are free is not looked at."""
    prepared = prepare_router(settings)
    found = shared_auto_values(settings, prepared.checkpoint.facts())
    return {**found, **parser_values(settings, prepared.text.parsers)}


@dataclass(frozen=True, slots=True)
class PreparedRouter:
    """What the settings amount to, before anything is opened."""

    checkpoint: Checkpoint
    text: FrontText
    workers: tuple[FrontWorker, ...]
    secret_path: Path


def prepare_router(settings: Settings) -> PreparedRouter:
    """Nothing is opened. Raises ConfigError."""
    if settings.security.cluster_key_file is None:
        raise ConfigError(NO_CLUSTER_KEY)
    secret_path = Path(settings.security.cluster_key_file).resolve()
    read_cluster_key(secret_path)
    checkpoint = Checkpoint.open(settings.model.model_path, settings.model.json_model_override_args)
    text = check_front(settings, checkpoint)
    workers = (FrontWorker(name=w.name, role=w.role, url=w.url) for w in parse_workers(settings.network.workers or ""))
    return PreparedRouter(checkpoint, text, tuple(workers), secret_path)
