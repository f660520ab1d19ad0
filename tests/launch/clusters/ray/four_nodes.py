"""`python -m tests.launch.clusters.ray.four_nodes NETWORK`: a Ray cluster of four nodes on this machine, each with an
address of its own in NETWORK (`127.x.y`) and one CPU, until stdin ends. The first line of stdout says where it is."""

import json
import shutil
import sys
import tempfile

import psutil
from ray.cluster_utils import Cluster

NUM_NODES = 4
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


def main(network: str) -> None:
    """Serve until stdin ends; then nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie in it, whose paths must be short
    addresses = [f"{network}.{number}" for number in range(2, 2 + NUM_NODES)]
    started: list[psutil.Process] = []
    try:
        head = {**_NODE, "node_ip_address": addresses[0], "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for address in addresses[1:]:
            cluster.add_node(**_NODE, node_ip_address=address)
        started = psutil.Process().children(recursive=True)
        running = cluster.list_all_nodes()
        raylets = {node.node_ip_address: node.all_processes["raylet"][0].process.pid for node in running}
        print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
        sys.stdin.read()
        cluster.shutdown()
    finally:
        for process in started:
            if process.is_running():
                process.kill()
        psutil.wait_procs(started)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
