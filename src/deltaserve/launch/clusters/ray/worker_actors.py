"""The actors of a server's workers: made in a placement group, asked every second, ended in order."""

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.ids import Role
from deltaserve.launch.clusters.ray.node_actor import NodeActor
from deltaserve.launch.clusters.worker_keeper import KeeperReport
from deltaserve.launch.clusters.worker_plan import PlannedWorker, room_needed
from deltaserve.process.children.terminal import Say

_ANY = "auto"
_DIAL_S = 10.0
_ROOM_WAIT_S = 5.0
_LAST_WORDS_S = 10.0
"""What a worker's keeper needs beyond the worker's own grace."""
_POLL_S = 0.2


class Gone(NamedTuple):
    """A worker's actor does not answer."""

    reason: str
    is_final: bool
    """Ray does not make it anew."""


class ActorAnswer(NamedTuple):
    """What came of asking one worker's actor."""

    worker: PlannedWorker
    answer: KeeperReport | Gone


def connect(address: str | None, shows_logs: bool) -> None:
    """Join the cluster as a driver. Raises ConfigError when there is none, or this machine is not in it."""
    if address is not None and address != _ANY:
        _require_listener(address)
    try:
        ray.init(
            address=address or _ANY,
            log_to_driver=shows_logs,
            logging_level=logging.ERROR,
            namespace="deltaserve",
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        given = "" if address is None else f" {address[:80]}"
        raise ConfigError(
            f"--cluster ray: no cluster at --address{given or ' auto'}: {one_line(error)[:300]}; "
            "`ray start --head` begins one, `ray start --address HOST:PORT` joins one"
        ) from None


def _require_listener(address: str) -> None:
    """Ray itself would try for a minute and more. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_DIAL_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--address {address[:80]}: no head of a Ray cluster answers there: {error}") from None


def node_addresses() -> list[str]:
    """Addresses of the nodes that are there."""
    return [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]


def num_gpus() -> float:
    """GPUs of all nodes."""
    return float(ray.cluster_resources().get("GPU", 0.0))


class WorkerActors:
    """One actor for each worker, each in a bundle of its own."""

    def __init__(self, workers: Sequence[PlannedWorker], tell: Say) -> None:
        """Waits until there is room for all."""
        self._workers = {worker.name: worker for worker in workers}
        self._group: PlacementGroup = placement_group([worker.bundle for worker in workers], strategy="SPREAD")
        self._actors: dict[str, Any] = {}
        self._pending: dict[Any, str] = {}
        self._seen: dict[str, tuple[str, int]] = {}
        """Worker |-> life of its keeper, and how many of its lines were told."""
        is_told = False
        while not self._group.wait(timeout_seconds=_ROOM_WAIT_S):
            if not is_told:
                is_told = True
                tell(f"waits for room in the cluster: {room_needed(workers)}")
        for index, worker in enumerate(workers):
            self._actors[worker.name] = self._make(worker, index)
            self._ask(worker.name)

    def _make(self, worker: PlannedWorker, index: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        actor = ray.remote(NodeActor).options(
            num_cpus=worker.num_cpus,
            num_gpus=worker.num_gpus,
            scheduling_strategy=place,
            max_restarts=-1,
            max_task_retries=0,
        )
        return actor.remote(msgspec.json.encode(worker))

    def _ask(self, name: str) -> None:
        _, num_seen = self._seen.get(name, ("", 0))
        self._pending[self._actors[name].report.remote(num_seen)] = name

    def hear(self, timeout_s: float) -> Iterator[ActorAnswer]:
        """What actors have answered within that time; each is asked again."""
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=timeout_s)
        for reference in ready:
            name = self._pending.pop(reference)
            yield ActorAnswer(self._workers[name], self._answer(name, reference))
        for name in self._workers.keys() - self._pending.values():
            self._ask(name)

    def _answer(self, name: str, reference: Any) -> KeeperReport | Gone:
        try:
            report = msgspec.json.decode(ray.get(reference), type=KeeperReport)
        except RayActorError as error:
            return Gone(one_line(error)[:300], isinstance(error, ActorDiedError))
        except RayError as error:
            return Gone(one_line(error)[:300], is_final=False)
        life, num_seen = self._seen.get(name, ("", 0))
        if life not in ("", report.life) and num_seen > 0:  # another keeper, asked for lines behind those of the last
            self._seen[name] = (report.life, 0)
            return msgspec.structs.replace(report, lines=())
        self._seen[name] = (report.life, report.num_lines)
        return report

    # ------------------------------------------------------------ the end

    def end(self, tell: Say) -> None:
        """Have decode workers drain and end, then prefill workers; then nothing of them is left."""
        try:
            for role in (Role.DECODE, Role.PREFILL):
                self._end_role([worker for worker in self._workers.values() if worker.role is role], tell)
        finally:
            self.kill()

    def _end_role(self, workers: Sequence[PlannedWorker], tell: Say) -> None:
        waited_for = set()
        for worker in workers:
            with suppress(RayError):
                self._actors[worker.name].stop.remote()
                waited_for.add(worker.name)
        deadline = time.monotonic() + max((worker.grace_s for worker in workers), default=0.0) + _LAST_WORDS_S
        while waited_for and time.monotonic() < deadline:
            for worker, answer in self.hear(_POLL_S):
                if isinstance(answer, KeeperReport):
                    for line in answer.lines:
                        tell(line)
                if isinstance(answer, Gone) or answer.exit_code is not None:
                    waited_for.discard(worker.name)
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End the actors, and by that their workers, and give back what was reserved."""
        for actor in self._actors.values():
            with suppress(RayError):
                ray.kill(actor)
        with suppress(RayError):
            remove_placement_group(self._group)
