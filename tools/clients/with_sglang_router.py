"""sglang-router in P/D mode: see pd_router.py."""

import sys

from tools.clients.pd_router import main

if __name__ == "__main__":
    main([sys.executable, "-m", "sglang_router.launch_router"])
