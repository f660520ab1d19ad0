"""`python -m deltaserve.process.worker.rank FILE RANK`: one further rank of a worker, started by its rank 0."""

import importlib
import sys

from deltaserve.process.children.interrupts import end_silently

if __name__ == "__main__":
    end_silently()  # before torch is imported; `run_rank` ignores them as soon as it computes
    build_rank = importlib.import_module("deltaserve.process.worker.build").build_rank
    importlib.import_module("deltaserve.process.worker.rank_process").run_rank(sys.argv, build_rank)
