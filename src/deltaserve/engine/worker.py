"""`python -m deltaserve.engine.worker SPEC.json`: one worker process."""

import importlib
import sys

from deltaserve.engine.interrupts import end_silently

if __name__ == "__main__":
    end_silently()  # before torch is imported; `run_worker` drains instead as soon as it serves
    build_worker = importlib.import_module("deltaserve.engine.build").build_worker
    run_worker = importlib.import_module("deltaserve.engine.worker_process").run_worker
    run_worker(sys.argv, build_worker, (sys.executable, "-m", "deltaserve.engine.rank"))
