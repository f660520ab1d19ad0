"""`python -m tests.launch.clusters.ray.four_nodes NETWORK`: a Ray cluster of four nodes on this machine, each with an
address of its own in NETWORK (`127.x.y`) and two CPUs, until stdin ends. The first line of stdout says where it is."""

import json
import os
import shutil
import sys
import tempfile

import psutil
from ray.cluster_utils import Cluster

NUM_NODES = 4
_MOST_STARTS = 5
_NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}


def main(network: str) -> None:
    """Serve until stdin ends; then nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie in it, whose paths must be short
    addresses = [f"{network}.{number}" for number in range(2, 2 + NUM_NODES)]
    os.environ["RAY_TMPDIR"] = folder  # where Ray's Cluster notes its address, in a folder that it takes for made
    os.mkdir(f"{folder}/ray")
    started: list[psutil.Process] = []
    try:
        cluster = _begin(addresses, folder)
        started = psutil.Process().children(recursive=True)
        running = cluster.list_all_nodes()
        raylets = {node.node_ip_address: node.all_processes["raylet"][0].process.pid for node in running}
        print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
        sys.stdin.read()
        cluster.shutdown()
    finally:
        _kill(started)
        shutil.rmtree(folder, ignore_errors=True)


def _begin(addresses: list[str], folder: str) -> Cluster:
    """Ray gives each node 30 s to start, which a busy machine may not hold: then all begin again."""
    for _ in range(_MOST_STARTS - 1):
        try:
            return _started(addresses, folder)
        except Exception as error:
            print(f"starts again: {error}", file=sys.stderr)
            _kill(psutil.Process().children(recursive=True))
    return _started(addresses, folder)


def _started(addresses: list[str], folder: str) -> Cluster:
    head = {**_NODE, "node_ip_address": addresses[0], "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for address in addresses[1:]:
        cluster.add_node(**_NODE, node_ip_address=address)
    return cluster


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()
    psutil.wait_procs(processes)


if __name__ == "__main__":
    main(sys.argv[1])
