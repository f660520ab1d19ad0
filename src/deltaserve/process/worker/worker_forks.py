"""`python -m deltaserve.process.worker.worker_forks`: loads what a worker needs, and becomes workers by forks."""

import gc
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from deltaserve.process.children.exits import Exit, leave
from deltaserve.process.children.forking import fork_on_request
from deltaserve.process.children.interrupts import end_silently
from deltaserve.process.children.parent import Parent


def main() -> NoReturn:
    """Load, then fork until the supervisor is gone."""
    end_silently()
    parent = Parent.attach()
    if parent is None:
        leave(Exit.CONFIG)
    gc.disable()  # what is loaded stays
    build_worker = importlib.import_module("deltaserve.process.worker.build").build_worker
    run_worker = importlib.import_module("deltaserve.process.worker.worker_process").run_worker
    gc.freeze()  # a collection in a forked process would copy all of it
    gc.enable()

    def run(argv: Sequence[str]) -> None:
        run_worker(argv, build_worker, (sys.executable, "-m", "deltaserve.process.worker.rank"))

    fork_on_request(parent, run)


if __name__ == "__main__":
    main()
