"""`deltaserve serve MODEL --cluster ray`: the front here, the workers on nodes of a Ray cluster."""

import threading
from pathlib import Path

import msgspec
import ray

from deltaserve.launch.clusters.places_file import PlacesFile
from deltaserve.launch.clusters.ray.worker_actors import (
    ActorAnswer,
    Gone,
    WorkerActors,
    connect,
    node_addresses,
    num_gpus,
)
from deltaserve.launch.clusters.worker_plan import (
    Consequence,
    KnownPlaces,
    PlannedWorker,
    check_nodes,
    consequence_of,
    plan_workers,
)
from deltaserve.launch.fronts import front_specs
from deltaserve.launch.router import WAITS_FOR_OTHERS, PreparedRouter, front_name, prepare_router
from deltaserve.launch.router import rehearse as rehearse_router
from deltaserve.launch.serve import (
    front_spec,
    keep_logs,
    open_log_dir,
    require_free_ports,
    speaker,
    tell_sampling,
    teller,
)
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec
from deltaserve.process.children.exits import Exit, start_thread
from deltaserve.process.children.interrupts import clean_up_first
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.children.terminal import Say
from deltaserve.process.front.front_spec import front_child
from deltaserve.settings.config import Settings

_LOOK_S = 1.0
_POLL_S = 0.1


def run(settings: Settings) -> int:
    """Serve until a stop signal; the exit code. Raises ConfigError."""
    prepared = prepare_router(settings)
    require_free_ports(settings)
    tell = speaker(settings)
    for note in prepared.checkpoint.notes:
        tell(note)
    tell_sampling(prepared.text.sampling, tell)
    tell(f"joins the Ray cluster at {settings.cluster.address or 'RAY_ADDRESS, or else this machine'}")
    with private_folder(settings.process.state_dir) as folder:
        connect(settings.cluster.address, settings.logging.log_to == "stdout")
        clean_up_first()  # Ray has taken the stop signals
        try:
            check_nodes(node_addresses(), settings)
            workers = plan_workers(settings, num_gpus())
            actors = WorkerActors(workers, tell)
            try:
                return _serve(settings, prepared, folder, WorkerWatch(workers, actors, folder / "workers", tell))
            finally:
                actors.end(tell)
        finally:
            ray.shutdown()


def rehearse(settings: Settings) -> dict[str, str]:
    """What auto came to, by field, as far as this machine can know. Raises ConfigError; no cluster is asked."""
    return rehearse_router(settings)


def _serve(settings: Settings, prepared: PreparedRouter, folder: Path, watch: "WorkerWatch") -> int:
    """The fronts, until they are told to end, or there are no workers for them."""
    logging = settings.logging
    log_dir = folder if logging.log_dir is None else open_log_dir(Path(logging.log_dir))
    options = SupervisorOptions(
        None if logging.log_to == "stdout" else log_dir, settings.process.shutdown_grace_s, restarts=WAITS_FOR_OTHERS
    )
    tell = teller(settings, watch.tell)
    supervisor = Supervisor(_front_children(settings, prepared, folder, watch.list), options, tell)
    watch.look_until_one_is_known()
    watch.start(supervisor)
    try:
        code = supervisor.run()
    finally:
        watch.stop()
    if code is Exit.FAILED and options.log_dir is folder:
        watch.tell(keep_logs(folder))
    return int(code or watch.code)


def _front_children(settings: Settings, prepared: PreparedRouter, folder: Path, workers: Path) -> list[ChildSpec]:
    front = front_spec(settings, prepared.checkpoint, prepared.secret_path)
    spec = msgspec.structs.replace(front, name=front_name(settings), workers_file=str(workers))
    return [front_child(each, folder) for each in front_specs(spec, settings)]


class WorkerWatch:
    """Asks the actors how their workers are, tells the user, and keeps the list that the fronts look at."""

    def __init__(self, workers: tuple[PlannedWorker, ...], actors: WorkerActors, path: Path, tell: Say) -> None:
        self.list, self.tell = path, tell
        self._file = PlacesFile(path, tell)
        self.code = Exit.OK
        self._workers, self._actors = workers, actors
        self._places = KnownPlaces(workers)
        self._exits: dict[str, int] = {}
        self._gone: set[str] = set()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def look_until_one_is_known(self) -> None:
        """A front that finds no list would complain. Or until the server is over."""
        while not self.list.exists() and self._look() is Consequence.GOES_ON:
            self._is_over.wait(_POLL_S)

    def start(self, fronts: Supervisor) -> None:
        """`fronts`: told to stop when there are no workers for them.

        What nobody expected ends the process, and with it all of the server: nobody would see a worker come back.
        """
        self._thread = start_thread("watch", lambda: self._watch(fronts))

    def stop(self) -> None:
        """Nobody is asked, and nothing is told any more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, fronts: Supervisor) -> None:
        while not self._is_over.wait(_LOOK_S):
            consequence = self._look()
            if consequence is not Consequence.GOES_ON:
                self.code = Exit.CONFIG if consequence is Consequence.IS_REFUSED else Exit.FAILED
                fronts.stop()
                return

    def _look(self) -> Consequence:
        for heard in self._actors.hear(_LOOK_S):
            self._take(heard)
        self._file.keep(self._places.lines())
        return consequence_of(self._workers, self._exits)

    def _take(self, heard: ActorAnswer) -> None:
        name = heard.worker.name
        if name in self._exits:
            return
        if isinstance(heard.answer, Gone):
            self._take_gone(heard.worker, heard.answer)
            return
        report = heard.answer
        self._gone.discard(name)
        if self._places.is_at(name, report.host):
            self.tell(f"{name}: on node {report.host}")
        for line in report.lines:
            self.tell(line)
        if report.exit_code is not None:
            self._end(name, report.exit_code)

    def _take_gone(self, worker: PlannedWorker, gone: Gone) -> None:
        if gone.is_final:
            self.tell(f"{worker.name}: Ray has given it up: {gone.reason}")
            self._end(worker.name, Exit.FAILED)
        elif worker.name not in self._gone:
            self._gone.add(worker.name)
            self.tell(f"{worker.name}: its node does not answer; Ray starts it again where there is room")

    def _end(self, name: str, code: int) -> None:
        self._exits[name] = code
        self._places.forget(name)
