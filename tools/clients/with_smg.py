"""smg in P/D mode: see pd_router.py."""

import sys
from pathlib import Path

from tools.clients.pd_router import main

if __name__ == "__main__":
    main([str(Path(sys.executable).with_name("smg")), "launch"])
