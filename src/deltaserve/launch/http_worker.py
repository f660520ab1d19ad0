"""`deltaserve prefill|decode MODEL --http PORT`: a worker and a front that speaks for it alone, under a supervisor.

For routers of other projects, which choose pairs themselves and send each request to both workers of a pair: see
server/half.py.
"""

import os
from dataclasses import replace

import msgspec

from deltaserve.core.ids import Role
from deltaserve.launch.compose import worker_child
from deltaserve.launch.process_limits import require_threads
from deltaserve.launch.router import front_name
from deltaserve.launch.serve import (
    check_front,
    front_spec,
    parser_values,
    require_free_ports,
    speaker,
    supervisor_options,
    tell_sampling,
)
from deltaserve.launch.supervisor import Supervisor
from deltaserve.launch.worker_command import (
    PreparedWorker,
    advertised,
    prepare_worker,
    require_link_port,
    trusted_network,
)
from deltaserve.process.children.child_events import AllReady, ChildEvent
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.front.front_spec import FrontSpec, FrontWorker, front_child
from deltaserve.server.settings import Half
from deltaserve.settings.config import Settings
from deltaserve.settings.resolve import auto_values
from deltaserve.settings.urls import api_url


def run_http_worker(settings: Settings, role: Role) -> int:
    """Run the worker and its front until a stop signal; the exit code. Raises ConfigError before either is started."""
    prepared = prepare_worker(settings, role)
    own = as_front(settings)
    text = check_front(own, prepared.checkpoint)
    require_link_port(settings)
    require_free_ports(own)
    ranks = prepared.resolved
    require_threads(1 + ranks.tp_size, ranks.tp_size * ranks.num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tell = speaker(settings)
    prepared.tell(settings, tell)
    tell_sampling(text.sampling, tell)
    worker = prepared.spec(settings, role)
    front = _front(own, prepared, role, worker.name)
    with private_folder(settings.process.state_dir) as folder:
        seen = msgspec.structs.replace(worker, log=msgspec.structs.replace(worker.log, is_seen=True))
        children = [worker_child(seen, folder), front_child(front, folder)]

        def say(event: ChildEvent) -> None:
            tell(event)
            if isinstance(event, AllReady):
                tell(f"takes its half of requests at {api_url(own.network)}/v1, for a router (Ctrl-C ends it)")

        return int(Supervisor(children, supervisor_options(settings, None), say).run())


def rehearse_http_worker(settings: Settings, role: Role) -> dict[str, str]:
    """What auto came to, by field. Raises ConfigError as `run_http_worker` does; ports are not looked at."""
    prepared = prepare_worker(settings, role)
    text = check_front(as_front(settings), prepared.checkpoint)
    return {**auto_values(settings, prepared.resolved, role.value), **parser_values(settings, text.parsers)}


def as_front(settings: Settings) -> Settings:
    """The settings of the worker's front: its API is where --http says."""
    network = settings.network.model_copy(update={"port": settings.network.http})
    return settings.model_copy(update={"network": network})


def _front(own: Settings, prepared: PreparedWorker, role: Role, worker: str) -> FrontSpec:
    host, _, port = advertised(own).rpartition(":")
    resolved = prepared.resolved
    half = Half(
        role=role,
        host=host,
        port=int(port),
        network=trusted_network(own),
        tp_size=resolved.tp_size,
        max_running=resolved.max_running_requests,
    )
    front = front_spec(own, prepared.checkpoint, prepared.secret_path)
    return msgspec.structs.replace(
        front,
        name=front_name(own),
        log=msgspec.structs.replace(front.log, is_seen=True),
        workers=(FrontWorker(name=worker, role=role),),
        server=replace(front.server, half=half),
    )
