"""The actor that keeps one worker: all that Ray runs of us on a node. It answers with what a line of a log holds;
neither prompts nor tokens nor pages come by here."""

import msgspec
import ray

from deltaserve.launch.clusters.worker_keeper import WorkerKeeper
from deltaserve.launch.clusters.worker_plan import PlannedWorker


class NodeActor:
    """One worker, on whichever node Ray makes this. Ray makes it anew elsewhere when the node is lost."""

    def __init__(self, worker: bytes) -> None:
        """`worker`: a `PlannedWorker` as JSON."""
        planned = msgspec.json.decode(worker, type=PlannedWorker)
        self._keeper = WorkerKeeper(planned, ray.util.get_node_ip_address())

    def report(self, num_seen: int) -> bytes:
        """A `KeeperReport` as JSON."""
        return msgspec.json.encode(self._keeper.report(num_seen))

    def stop(self) -> None:
        """Have the worker drain and end."""
        self._keeper.stop()
