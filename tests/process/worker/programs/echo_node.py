"""A further node of an echo worker."""

import sys
from pathlib import Path

from deltaserve.process.worker.further_node import run_node

if __name__ == "__main__":
    run_node(sys.argv, (sys.executable, str(Path(__file__).with_name("echo_rank.py"))))
