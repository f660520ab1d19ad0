"""A small child of a supervisor. What it hears it writes to its output, which is its log.

child.py BEHAVIOUR: serve | crash | refuse | bare-exit-2 | crash-after-ready | reboots | stubborn | talkative | hang |
hang-later | show
"""

import json
import os
import random
import select
import signal
import sys
import time
from types import FrameType

from deltaserve.process.children.notices import PeerDown, PeerHalted, PeerUp
from deltaserve.process.children.parent import Parent
from deltaserve.process.links.links import Links


def main(behaviour: str) -> int:
    parent = Parent.attach()
    assert parent is not None
    print_found() if behaviour == "show" else parent.progress("waking up")
    if behaviour == "crash":
        print("the roof is on fire", flush=True)
        return 3
    if behaviour == "refuse":
        parent.refuse("page_size 3: not a power of two")
        return 2
    if behaviour == "bare-exit-2":
        print("first line\nport 80: permission denied", flush=True)
        return 2
    if behaviour == "hang" or (behaviour == "hang-later" and parent.welcome.url is not None):
        time.sleep(3600)
    links = Links()
    wanted = 0 if parent.welcome.url is None else int(parent.welcome.url.rpartition(":")[2])
    port = links.listen("127.0.0.1", wanted)
    for peer in parent.welcome.peers:
        print(f"known {peer.name}", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else on_term)
    parent.ready(f"tcp://127.0.0.1:{port}", os.getpid())
    if behaviour == "reboots":
        print(f"started after {parent.welcome.former_boot}", flush=True)
        parent.rebooted(parent.welcome.former_boot + 1_000_000_000)
    if behaviour in ("crash-after-ready", "reboots"):
        return 4
    while not parent.is_gone:
        if behaviour == "talkative":
            print("blah " * 2000, flush=True)
        select.select([parent], [], [], 0.05)  # a signal just before it would not end the wait
        for notice in parent.receive():
            if isinstance(notice, PeerUp | PeerDown):
                print(f"{type(notice).__name__} {notice.name}", flush=True)
            elif isinstance(notice, PeerHalted):
                print(f"PeerHalted {notice.name} {notice.pid}", flush=True)
    return 0


def _open_files() -> list[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in sorted(listed) if os.path.exists(f"/proc/self/fd/{number}")]


def print_found() -> None:
    """What a process finds when it starts, and may depend on how it was."""
    kinds = [os.path.basename(os.readlink(f"/proc/self/fd/{number}")) for number in _open_files()]
    found = {
        "argv": sys.argv[1:],
        "variable": os.environ.get("OF_CHILD"),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "files": [kind.partition(":")[0] for kind in kinds],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "random": random.random(),
    }
    print(json.dumps(found), flush=True)


def on_term(number: int, frame: FrameType | None) -> None:
    print(f"draining at {time.monotonic()}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
