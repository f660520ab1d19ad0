"""`python -m tests.process.front.stuck_end COMMAND...`: deltaserve, but that a front never closes its links."""

import sys
import threading

from deltaserve.cli.main import main
from deltaserve.process.children import exits
from deltaserve.process.front.router_engine import RouterEngine

if __name__ == "__main__":
    exits._END_CHECKS = 1
    RouterEngine.close = lambda _: threading.Event().wait()  # type: ignore[assignment,method-assign]
    sys.exit(main())
