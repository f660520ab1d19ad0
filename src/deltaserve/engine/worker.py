"""`python -m deltaserve.engine.worker SPEC.json`: one worker process."""

import sys

from deltaserve.engine.build import build_worker
from deltaserve.engine.process import run_worker

if __name__ == "__main__":
    run_worker(sys.argv, build_worker)
