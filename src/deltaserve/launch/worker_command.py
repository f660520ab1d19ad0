"""`deltaserve prefill|decode MODEL`: one worker for a `router`; this process becomes it."""

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.compose import Checkpoint, divided, has_staging, machine_facts, open_checkpoint, worker_spec
from deltaserve.launch.lacking import transfer_flags
from deltaserve.launch.net_devices import check_devices, interface_addresses, net_devices
from deltaserve.launch.process_limits import require_files, require_threads
from deltaserve.launch.serve import describe_cache_dir, describe_staging, require_free_port, tell_native, tell_resolved
from deltaserve.process.children.child_events import ChildStarts
from deltaserve.process.children.interrupts import hold_for_successor
from deltaserve.process.children.terminal import Say, say, say_in_json
from deltaserve.process.front.secrets import NO_CLUSTER_KEY, read_cluster_key
from deltaserve.process.worker.worker_spec import (
    ExpertSeat,
    RankNodes,
    WorkerSpec,
    encode_spec,
    ranks_here,
    worker_environment,
)
from deltaserve.settings.config import FRONTS, Settings
from deltaserve.settings.flags.options import read_options
from deltaserve.settings.host_and_port import is_loopback
from deltaserve.settings.resolve import ResolvedConfig, auto_values, resolve
from deltaserve.settings.worker_list import name_of
from deltaserve.transports.registry import DataAddress, DataNetwork, TransportKind, transport_kind

_LOOPBACK = "127.0.0.0/8"
"""Network to trust where none was given: settings/rules.py lets only a worker on loopback do without one."""


def run_worker_command(settings: Settings, role: Role) -> int:
    """Become the worker: returns only where that fails. Raises ConfigError."""
    prepared = prepare_worker(settings, role)
    if not prepared.is_further_node:
        require_link_port(settings)
    require_files()
    spec = prepared.spec(settings, role)
    num_ranks = len(ranks_here(spec))
    require_threads(num_ranks, num_ranks * prepared.resolved.num_threads)
    name = spec.name
    tell = say if spec.log.format == "text" else say_in_json(name, sys.stderr)
    prepared.tell(settings, tell)
    if idle := sorted(given_for_fronts(settings)):
        tell(f"without --http nothing here takes requests: {', '.join(idle)} have no effect")
    tell(ChildStarts(name, os.getpid()))
    program = f"deltaserve.process.worker.{'node' if prepared.is_further_node else 'worker'}"
    argv = [sys.executable, "-m", program, _in_memory(encode_spec(spec))]
    hold_for_successor()
    os.execve(sys.executable, argv, {**os.environ, **worker_environment(spec)})


def given_for_fronts(settings: Settings) -> Iterator[str]:
    """Flags that only a front reads, of those that are not as they are by default."""
    for option in read_options():
        if option.commands == FRONTS and getattr(getattr(settings, option.group), option.field) != option.default:
            yield option.flag


def rehearse_worker_command(settings: Settings, role: Role) -> dict[str, str]:
    """What auto came to, by field. Raises ConfigError as the command does; whether ports are free is not looked at."""
    return auto_values(settings, prepare_worker(settings, role).resolved, role.value)


@dataclass(frozen=True, slots=True)
class PreparedWorker:
    """What the settings amount to, before anything is opened."""

    checkpoint: Checkpoint
    resolved: ResolvedConfig
    secret_path: Path
    data: DataAddress
    """Where page transfers listen."""
    nodes: RankNodes | None
    """The machines that share out the worker's ranks; None: they are all on this one."""
    seat: ExpertSeat | None
    """Its place in an expert group; None: it is in none."""

    @property
    def is_further_node(self) -> bool:
        """Whether the worker is elsewhere, and ranks of it are here."""
        return self.nodes is not None and self.nodes.node > 0

    def spec(self, settings: Settings, role: Role) -> WorkerSpec:
        """The worker, as others reach it."""
        name = settings.network.worker_name or name_of(role, advertised(settings))
        return msgspec.structs.replace(
            worker_spec(name, role, settings, self.checkpoint, self.resolved, self.secret_path),
            host=settings.network.host,
            port=settings.disaggregation.disaggregation_bootstrap_port,
            transport_devices=self.data.devices,
            transport_host=self.data.host,
            nodes=self.nodes,
            expert_seat=self.seat,
        )

    def tell(self, settings: Settings, tell: Say) -> None:
        """What was decided."""
        for note in self.checkpoint.notes:
            tell(note)
        tell_resolved(self.resolved, tell)
        tell_native([self.resolved], tell)
        if has_staging(settings):
            tell(describe_staging(settings))
        if settings.memory.cache_dir is not None:
            tell(describe_cache_dir(settings))


def require_link_port(settings: Settings) -> None:
    """Raises ConfigError when nobody could listen for links."""
    port = settings.disaggregation.disaggregation_bootstrap_port
    require_free_port("--disaggregation-bootstrap-port", settings.network.host, port)


def prepare_worker(settings: Settings, role: Role) -> PreparedWorker:
    """Nothing is opened. Raises ConfigError."""
    if settings.security.cluster_key_file is None:
        raise ConfigError(NO_CLUSTER_KEY)
    secret_path = Path(settings.security.cluster_key_file).resolve()
    read_cluster_key(secret_path)
    checkpoint = open_checkpoint(settings)
    model = divided(settings, checkpoint, role, settings.parallelism.dp_size)
    facts = machine_facts(settings, num_workers_here(settings) * model.tp_size // _num_nodes(settings))
    if facts.device == "cuda":  # of which CUDA_VISIBLE_DEVICES gives each rank its own
        facts = dataclasses.replace(facts, num_ranks=facts.num_devices)
    resolved = resolve(settings, model, facts)
    kind = transport_kind(resolved.transfer_backend)
    addresses = interface_addresses()
    data = data_address(settings, kind, addresses, net_devices())
    nodes, seat = rank_nodes(settings, addresses), expert_seat(settings, addresses)
    return PreparedWorker(checkpoint, resolved, secret_path, data, nodes, seat)


def _num_nodes(settings: Settings) -> int:
    """Machines that share out the ranks of one worker."""
    return settings.parallelism.nnodes if settings.parallelism.dp_size == 1 else 1


def num_workers_here(settings: Settings) -> int:
    """How many share cores and memory: one that only this machine can reach has its peer here too, and its nodes or the
    other members of its group."""
    nodes, address = settings.parallelism.nnodes, settings.parallelism.dist_init_addr
    if nodes > 1 and address is not None:
        return 2 * nodes if is_loopback(address.rpartition(":")[0]) else 1
    return 2 if is_loopback(settings.network.host) else 1


def advertised(settings: Settings) -> str:
    """HOST:PORT that peers dial. Behind a port mapping or a service neither need be what this worker listens on."""
    asked, own_port = settings.network.advertise, settings.disaggregation.disaggregation_bootstrap_port
    host, _, port = (settings.network.host if asked is None else asked).partition(":")
    return f"{host}:{port or own_port}"


def _in_memory(content: bytes) -> str:
    """Path of a file that this process and what replaces it can read, and that is gone with them."""
    descriptor = os.memfd_create("deltaserve-worker", 0)  # not closed on exec
    os.write(descriptor, content)
    return f"/proc/self/fd/{descriptor}"


def data_address(
    settings: Settings, kind: TransportKind, addresses: Mapping[str, Sequence[str]], known: Sequence[str]
) -> DataAddress:
    """What --transfer-devices, of the devices known here, and --trusted-data-network come to. Raises ConfigError."""
    flags = transfer_flags(settings)
    if flags.devices is not None:
        check_devices(flags.devices, known)
    network = trusted_network(settings)
    devices = flags.devices or data_devices(network, addresses)
    return kind.listen(flags, DataNetwork(network, devices, addresses))


def trusted_network(settings: Settings) -> str:
    """Where prefill and decode workers are."""
    return settings.security.trusted_data_network or _LOOPBACK


def rank_nodes(settings: Settings, addresses: Mapping[str, Sequence[str]]) -> RankNodes | None:
    """The machines that share out the worker's ranks; None: they are all on this one. Raises ConfigError."""
    return None if settings.parallelism.dp_size > 1 else _nodes(settings, addresses)


def expert_seat(settings: Settings, addresses: Mapping[str, Sequence[str]]) -> ExpertSeat | None:
    """The worker's place in an expert group, whose members meet over the network; None: it is in none. Raises
    ConfigError."""
    size, nodes = settings.parallelism.dp_size, _nodes(settings, addresses)
    return None if size == 1 or nodes is None else ExpertSeat(member=nodes.node, size=size, nodes=nodes)


def _nodes(settings: Settings, addresses: Mapping[str, Sequence[str]]) -> RankNodes | None:
    asked = settings.parallelism
    if asked.nnodes == 1 or asked.dist_init_addr is None:
        return None
    host, _, port = asked.dist_init_addr.rpartition(":")
    network = trusted_network(settings)
    data_devices(network, addresses)
    own = [address for of_one in addresses.values() for address in of_one if _is_on(network, address)]
    own_host = next((named for named in (settings.network.host, host) if named in own), own[0])
    return RankNodes(size=asked.nnodes, node=asked.node_rank, host=host, port=int(port), own_host=own_host)


def _is_on(network: str, address: str) -> bool:
    return IPv4Address(address) in IPv4Network(network, strict=False)


def data_devices(network: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """The interfaces on this network, as UCX_NET_DEVICES wants them. `addresses`: IPv4 addresses of each interface.

    Raises ConfigError when there is none: transfers carry no authentication and may listen nowhere else.
    """
    found = [name for name, own in addresses.items() if any(_is_on(network, address) for address in own)]
    if not found:
        known = ", ".join(address for own in addresses.values() for address in own)
        raise ConfigError(f"--trusted-data-network {network}: this machine is not on it; its addresses are {known}")
    return ",".join(found)
