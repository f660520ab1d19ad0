"""`deltaserve serve`, its direct writes cut to tokens, as engines without staging write. For bench_unequal.py.

    python -m benchmarks.token_writes serve MODEL --prefill-tp-size 2 ...

Only what goes between ranks with unequal heads is cut, into one descriptor for each token, head, layer, K and V; the
rest of the server is as it is. Workers and ranks are started as this script too.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from deltaserve.cli.main import main
from deltaserve.core.extents import Copy, Span
from deltaserve.core.layout.copy_plan import PlacedPages, Route
from deltaserve.launch import serve
from deltaserve.launch.compose import worker_child
from deltaserve.process.children.child import ChildSpec
from deltaserve.process.worker.build import build_rank, build_worker
from deltaserve.process.worker.rank_process import run_rank
from deltaserve.process.worker.worker_process import run_worker
from deltaserve.process.worker.worker_spec import WorkerSpec

PROGRAM = (sys.executable, __file__)


def token_copies(whole: Callable[[Route, PlacedPages, PlacedPages], list[Copy]]) -> Callable[..., list[Copy]]:
    def copies(route: Route, src: PlacedPages, dst: PlacedPages) -> list[Copy]:
        found = whole(route, src, dst)
        if route.is_whole or route.has_nothing:
            return found
        row = min(run.block.row_width for run in route.heads) * route.src.dtype.itemsize
        return [
            Copy(Span(here.region, here.offset + at, row), Span(there.region, there.offset + at, row))
            for here, there in found
            for at in range(0, here.num_bytes, row)
        ]

    return copies


def scattering_child(spec: WorkerSpec, folder: Path) -> ChildSpec:
    child = worker_child(spec, folder)
    return dataclasses.replace(child, argv=(*PROGRAM, "worker", child.argv[-1]))


def run() -> int:
    program, argv = sys.argv[1], sys.argv[1:]
    patch.object(Route, "copies", token_copies(Route.copies)).start()
    if program == "worker":
        run_worker(argv, build_worker, (*PROGRAM, "rank"))
    if program == "rank":
        run_rank(argv, build_rank)
    patch.object(serve, "worker_child", scattering_child).start()
    return main(argv)


if __name__ == "__main__":
    raise SystemExit(run())
