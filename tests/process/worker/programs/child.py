"""A small child of a supervisor. What it hears it writes to its output, which is its log.

child.py BEHAVIOUR: serve | crash | refuse | bare-exit-2 | crash-after-ready | reboots | stubborn | talkative | hang |
hang-later
"""

import os
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
    parent.progress("waking up")
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


def on_term(number: int, frame: FrameType | None) -> None:
    print(f"draining at {time.monotonic()}", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
