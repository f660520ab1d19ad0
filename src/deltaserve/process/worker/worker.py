"""`python -m deltaserve.process.worker.worker SPEC.json`: one worker process."""

import importlib
import sys

from deltaserve.process.children.interrupts import end_silently

if __name__ == "__main__":
    end_silently()  # before torch is imported; `run_worker` drains instead as soon as it serves
    build_worker = importlib.import_module("deltaserve.process.worker.build").build_worker
    run_worker = importlib.import_module("deltaserve.process.worker.worker_process").run_worker
    run_worker(sys.argv, build_worker, (sys.executable, "-m", "deltaserve.process.worker.rank"))
