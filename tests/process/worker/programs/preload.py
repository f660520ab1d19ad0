"""A preload process of `child.py`. preload.py [BEHAVIOUR]: fails | hangs | has-threads."""

import os
import sys
import threading
import time
from collections.abc import Sequence

from deltaserve.process.children.exits import Exit
from deltaserve.process.children.forking import fork_on_request
from deltaserve.process.children.interrupts import end_silently
from deltaserve.process.children.parent import Parent
from tests.process.worker.programs import child


def run(argv: Sequence[str]) -> None:
    try:
        code = child.main(argv[1])
    except SystemExit:
        code = Exit.OK
    sys.stdout.flush()
    os._exit(code)


def main(behaviour: str) -> None:
    end_silently()
    parent = Parent.attach()
    assert parent is not None
    if behaviour == "fails":
        sys.exit("a library is missing")
    if behaviour == "hangs":
        time.sleep(3600)
    if behaviour == "has-threads":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    fork_on_request(parent, run)


if __name__ == "__main__":
    main(sys.argv[1])
