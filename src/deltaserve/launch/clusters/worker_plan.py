"""Which workers a cluster is to run, what each needs of its node, and how it is started there. Opens nothing."""

import os
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto

import msgspec

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.compose import settings_of, tp_size_of, worker_names
from deltaserve.process.children.exits import Exit
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.options import Option, read_options
from deltaserve.settings.host_and_port import is_loopback

_OF_ITS_PLACE = {"host", "advertise", "worker_name", "disaggregation_bootstrap_port", "model_path", "log_to", "log_dir"}
"""Settings that a worker gets by where it runs, and not by a flag of `serve`."""


class PlannedWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker, as the node that runs it is told."""

    name: str
    """The same on whichever node it runs."""
    role: Role
    model: str
    flags: tuple[str, ...]
    """Flags of `deltaserve prefill` or `decode`, without those that say where it listens."""
    port: int
    """Port of its links: no other worker of this server has it, so that several may be on one node."""
    num_ranks: int
    num_cpus: int
    num_gpus: int
    start_timeout_s: float
    grace_s: float
    shows_log: bool = False
    """Whether what it logs goes to the output of who starts it."""
    log_dir: str | None = None
    """Folder of its node that keeps its log; None: a private one, kept only when it fails."""

    def argv(self, host: str) -> tuple[str, ...]:
        """What follows `deltaserve` on the node of that address."""
        place = ("--host", host, "--advertise", host, "--disaggregation-bootstrap-port", str(self.port))
        return (self.role.value, self.model, "--worker-name", self.name, *place, *self.flags)

    def entry(self, host: str) -> str:
        """Its line in a list of workers."""
        return f"{self.name}={self.role.value}@{host}:{self.port}"

    @property
    def bundle(self) -> dict[str, float]:
        """What it needs of one node: all its ranks are together."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        return {"CPU": float(self.num_cpus), **gpus}


def plan_workers(settings: Settings, num_cluster_gpus: float) -> tuple[PlannedWorker, ...]:
    """All workers. `num_cluster_gpus`: GPUs of all nodes; what --device auto comes to follows from whether there are
    any. Raises ConfigError."""
    device = settings.model.device
    if device == "cuda" and not num_cluster_gpus:
        raise ConfigError("--device cuda: no node of the cluster has a GPU to give")
    on_gpus = device != "cpu" and num_cluster_gpus > 0
    first_port = settings.disaggregation.disaggregation_bootstrap_port
    return tuple(
        _planned(settings, name, role, first_port + index, on_gpus)
        for index, (name, role) in enumerate(worker_names(settings))
    )


def _planned(settings: Settings, name: str, role: Role, port: int, on_gpus: bool) -> PlannedWorker:
    _, num_ranks = tp_size_of(settings, role)
    threads = settings_of(settings, role).scheduling.num_threads
    logging = settings.logging
    return PlannedWorker(
        name=name,
        role=role,
        model=os.path.abspath(settings.model.model_path or ""),
        flags=tuple(worker_flags(settings, role)),
        port=port,
        num_ranks=num_ranks,
        num_cpus=num_ranks * (1 if threads == "auto" else threads),
        num_gpus=num_ranks if on_gpus else 0,
        start_timeout_s=settings.process.start_timeout_s,
        grace_s=settings.process.shutdown_grace_s,
        shows_log=logging.log_to == "stdout",
        log_dir=None if logging.log_dir is None else os.path.abspath(logging.log_dir),
    )


def worker_flags(settings: Settings, role: Role) -> Iterator[str]:
    """What `serve` was told about such a worker, as flags of its own command: those that are not the default."""
    values, defaults = of_worker(settings, role).model_dump(), Settings().model_dump()
    for option in read_options():
        value = values[option.group][option.field]
        if value != defaults[option.group][option.field] and _is_handed_on(option, role):
            yield option.flag if option.is_switch else f"{option.flag}={value}"


def _is_handed_on(option: Option, role: Role) -> bool:
    return option.field not in _OF_ITS_PLACE and (not option.commands or role.value in option.commands)


def of_worker(settings: Settings, role: Role) -> Settings:
    """Settings as `deltaserve prefill` or `decode` is to read them, paths absolute."""
    own = settings_of(settings, role)
    _, tp_size = tp_size_of(settings, role)
    memory, decode = own.memory, role is Role.DECODE
    if memory.cache_dir is not None:
        memory = memory.model_copy(update={"cache_dir": os.path.abspath(memory.cache_dir)})
    if decode and memory.disable_decode_radix_cache:
        none = {"cache_dir": None, "cache_dir_mib": type(memory)().cache_dir_mib}
        memory = memory.model_copy(update={"disable_radix_cache": True, **none})
    draft, key = own.speculation.speculative_draft_model_path, own.security.cluster_key_file
    absolute = {"speculative_draft_model_path": None if draft is None else os.path.abspath(draft)}
    key_path = {"cluster_key_file": None if key is None else os.path.abspath(key)}
    return own.model_copy(
        update={
            "memory": memory,
            "parallelism": own.parallelism.model_copy(update={"tp_size": tp_size}),
            "speculation": own.speculation.model_copy(update=absolute),
            "security": own.security.model_copy(update=key_path),
        }
    )


def check_nodes(addresses: Iterable[str], settings: Settings) -> None:
    """Raises ConfigError when nodes have addresses beyond this machine, and no network was named for pages."""
    if settings.security.trusted_data_network is not None:
        return
    for address in addresses:
        if not is_loopback(address):
            raise ConfigError(
                f"--cluster {settings.cluster.cluster}: a node is {address}, and page transfers carry no "
                "authentication; name their network with --trusted-data-network"
            )


def room_needed(workers: Iterable[PlannedWorker]) -> str:
    """For people: what the nodes must have to give."""
    wants = [f"{worker.name} {_words(worker.bundle)}" for worker in workers]
    return "; ".join(wants)


def _words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {resource}" for resource, count in bundle.items())


# ---------------------------------------------------------------- who is there, and who is not


class Consequence(Enum):
    """What an ended worker means for the server."""

    GOES_ON = auto()
    FAILS = auto()
    IS_REFUSED = auto()


def consequence_of(workers: Iterable[PlannedWorker], exits: Mapping[str, int]) -> Consequence:
    """`exits`: exit codes of those workers that nobody starts again. What no node can run, as it is configured, ends
    the server; who keeps failing ends it when no other worker of that role is left."""
    if Exit.CONFIG in exits.values():
        return Consequence.IS_REFUSED
    left = {worker.role for worker in workers if worker.name not in exits}
    return Consequence.GOES_ON if left == {Role.PREFILL, Role.DECODE} else Consequence.FAILS


class KnownPlaces:
    """Where each worker runs, as far as it was told. A worker that vanished stays where it was until it is elsewhere:
    a front finds out by its own links that nobody answers there."""

    def __init__(self, workers: Iterable[PlannedWorker]) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._hosts: dict[str, str] = {}

    def is_at(self, name: str, host: str) -> bool:
        """Take note; whether that is news."""
        is_news = self._hosts.get(name) != host
        self._hosts[name] = host
        return is_news

    def forget(self, name: str) -> None:
        """Take note that it will not come back."""
        self._hosts.pop(name, None)

    def lines(self) -> str:
        """The list of workers, for the file that fronts look at."""
        return "".join(f"{self._workers[name].entry(host)}\n" for name, host in sorted(self._hosts.items()))
