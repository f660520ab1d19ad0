"""How long a front takes to answer while others send it bodies in chunks of one byte.

    python -m benchmarks.bench_small_chunks [--connections 24] [--requests 40]

GET /v1/models, one after the other: with nobody else there; then while another process sends completions over many
connections, their bodies in chunks of one byte, each sent again when it was answered or cut. A front parses each chunk
by itself, so that such a body takes a few hundred times the CPU time of one that has its length in its head.
"""

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from threading import Event

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import MemorySettings, ModelSettings, NetworkSettings, Settings

MODEL = Path(__file__).resolve().parent.parent / "models" / "recall-micro"
SETTINGS = Settings(
    model=ModelSettings(model_path=str(MODEL), device="cpu"),
    memory=MemorySettings(page_size=16),
    network=NetworkSettings(port=free_port()),
)
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
CHUNKS = b"1\r\n \r\n" * 10_000


def send_for_ever(port: int) -> None:
    """One connection after the other, each until the server has enough of it."""
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(HEAD)
                while True:
                    sock.sendall(CHUNKS)
        except OSError:
            time.sleep(0.01)


def attack(port: int, num_connections: int) -> None:
    """Threads of a process of their own: they wait for the network."""
    threads = [threading.Thread(target=send_for_ever, args=(port,)) for _ in range(num_connections)]
    for thread in threads:
        thread.start()


def latencies(url: str, num_requests: int) -> list[float]:
    """Seconds of each request."""
    found = []
    with httpx.Client(timeout=120.0) as client:
        for _ in range(num_requests):
            began = time.perf_counter()
            client.get(f"{url}/v1/models").raise_for_status()
            found.append(time.perf_counter() - began)
    return found


def measure(num_connections: int, num_requests: int, url: str, stopping: Event) -> dict[str, list[float]]:
    """State of the front |-> seconds of each request."""
    found = {"alone": latencies(url, num_requests)}
    port = int(url.rsplit(":", 1)[1])
    attacker = multiprocessing.get_context("spawn").Process(target=attack, args=(port, num_connections))
    attacker.start()
    try:
        time.sleep(3.0)
        found[f"{num_connections} connections"] = latencies(url, num_requests)
    finally:
        attacker.kill()
        attacker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=24)
    parser.add_argument("--requests", type=int, default=40)
    args = parser.parse_args()
    console = Console()
    work = partial(measure, args.connections, args.requests)
    table = Table("front", "median, ms", "most, ms")
    for name, seconds in serve_while(SETTINGS, as_resolved, work, console.print).items():
        table.add_row(name, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * max(seconds):.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
