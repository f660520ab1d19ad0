"""`python -m deltaserve.process.worker.node SPEC.json`: a further machine of a worker, with ranks of it."""

import importlib
import sys

from deltaserve.process.children.interrupts import end_silently

if __name__ == "__main__":
    end_silently()
    run_node = importlib.import_module("deltaserve.process.worker.further_node").run_node
    run_node(sys.argv, (sys.executable, "-m", "deltaserve.process.worker.rank"))
