"""`deltaserve doctor prefill|decode|router ARGV`: whether that command could run here now, and reach whom it needs."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from deltaserve.commands.doctor.links import check_links, link_fault
from deltaserve.commands.doctor.machine import check_device, check_listener, check_software
from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.findings import Level, Line
from deltaserve.core.ids import Role
from deltaserve.launch.compose import has_staging
from deltaserve.launch.fronts import front_ports
from deltaserve.launch.lacking import lacking
from deltaserve.launch.router import prepare_router
from deltaserve.launch.serve import describe, describe_staging
from deltaserve.launch.worker_command import prepare_worker
from deltaserve.process.front.front_spec import FrontWorker
from deltaserve.process.front.secrets import read_cluster_key
from deltaserve.process.front.worker_sources import look_up, read_list, words_of
from deltaserve.process.links.security import LinkSecurity
from deltaserve.process.worker.worker_spec import RankNodes
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.flag_help import About
from deltaserve.settings.flags.merge import read_line
from deltaserve.settings.flags.problems import problems_of, raise_problems
from deltaserve.settings.worker_list import WorkerEntry, parse_workers
from deltaserve.transports.registry import TransportOptions, transport_kind


def look_at(command: str, argv: Sequence[str]) -> Iterator[Line]:
    """One line per finding, as it is found."""
    yield from check_software()
    yield from check_device()
    about = About(f"whether `deltaserve {command}` could run here")
    try:
        line = read_line(command, about, argv, os.environ)
        yield from (Line(Level.OK, "settings", note) for note in line.notes)
        raise_problems([*line.problems, *lacking(command, line.settings)])
        yield from _CHECKS[command](line.settings)
    except ConfigError as error:
        yield from (Line(Level.FAIL, "settings", one_line(problem)) for problem in problems_of(error))


def _check_worker(role: Role, settings: Settings) -> Iterator[Line]:
    prepared = prepare_worker(settings, role)
    yield Line(Level.OK, "settings", describe(prepared.resolved))
    if has_staging(settings):
        yield Line(Level.OK, "settings", describe_staging(settings))
    security = LinkSecurity.from_cluster_key(read_cluster_key(prepared.secret_path))
    if not prepared.is_further_node:
        yield _check_links_listener(settings, security)
    nodes, seat = prepared.nodes, prepared.seat
    if nodes is not None:
        yield _check_nodes(nodes, security)
        yield Line(Level.OK, "listener", f"any free port of {nodes.own_host}: ranks on other machines of this worker")
    if seat is not None and seat.nodes is not None:
        yield _check_seat(seat.nodes)
    yield Line(
        Level.OK,
        "listener",
        f"any free port of {prepared.data.devices}: page transfers, which carry no authentication",
    )
    tls, data = prepared.resolved.transfer_tls, prepared.data
    options = TransportOptions(tls=tls, devices=data.devices, host=data.host)
    yield from transport_kind(prepared.resolved.transfer_backend).checks(options)


def _check_nodes(nodes: RankNodes, security: LinkSecurity) -> Line:
    """Whether other machines of the worker can join node 0, or it can be reached from here."""
    if nodes.node == 0:
        return _check_meeting(nodes, "machine", "this worker")
    address = f"{nodes.host}:{nodes.port}"
    fault = link_fault(address, security)
    if fault is None:
        return Line(Level.OK, "link", f"node 0 at {address}: listens, and has this cluster key")
    return Line(Level.WARN, "link", f"node 0 at {address}: {fault}; this node waits for it")


def _check_seat(nodes: RankNodes) -> Line:
    """Where the members of an expert group meet that are on several machines."""
    if nodes.node == 0:
        return _check_meeting(nodes, "member", "its expert group")
    return Line(Level.OK, "listener", f"any free port of {nodes.own_host}: other members of its expert group")


def _check_meeting(nodes: RankNodes, one: str, whole: str) -> Line:
    """Whether node 0 could wait there for the others."""
    count = nodes.size - 1
    return check_listener(nodes.own_host, nodes.port, f"{count} other {one}{'s' * (count > 1)} of {whole}")


def _check_links_listener(settings: Settings, security: LinkSecurity) -> Line:
    host, port = settings.network.host, settings.disaggregation.disaggregation_bootstrap_port
    line = check_listener(host, port, "links of this worker, for members of the cluster")
    if line.level is Level.FAIL and link_fault(f"{host}:{port}", security) is None:
        return Line(Level.WARN, "listener", f"{host}:{port}: a worker with this cluster key listens there already")
    return line


def _check_router(settings: Settings) -> Iterator[Line]:
    prepared = prepare_router(settings)
    yield Line(Level.OK, "settings", f"model {prepared.checkpoint.name}")
    workers = list(prepared.workers)
    for source, read in _lists(settings):
        try:
            listed = read()
        except (OSError, ValueError) as error:
            yield Line(Level.FAIL, "settings", f"{source}: {words_of(error)}")
            continue
        yield Line(Level.OK, "settings", f"{source}: workers: {', '.join(entry.name for entry in listed) or 'none'}")
        workers += [FrontWorker(name=entry.name, role=entry.role, url=entry.url) for entry in listed]
    api, *admin = front_ports(settings)
    yield check_listener(api.host, api.port, "API")
    for each in admin:
        yield check_listener(each.host, each.port, "admin routes")
    yield from check_links(workers, LinkSecurity.from_cluster_key(read_cluster_key(prepared.secret_path)))


def _lists(settings: Settings) -> Iterator[tuple[str, Callable[[], tuple[WorkerEntry, ...]]]]:
    """Where a router finds workers beside --workers, and what reads it."""
    network = settings.network
    if network.workers_file is not None:
        yield f"--workers-file {network.workers_file}", partial(read_list, Path(network.workers_file))
    for service in parse_workers(network.workers_dns or ""):
        yield f"--workers-dns {service.role.value}@{service.address}", partial(look_up, service)


_CHECKS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "prefill": partial(_check_worker, Role.PREFILL),
    "decode": partial(_check_worker, Role.DECODE),
    "router": _check_router,
}
