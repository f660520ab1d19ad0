"""`python -m tests.process.front.silent_source name|file`: a watch is cancelled while what it asked answers never."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltaserve.process.front.worker_sources import watch_file, watch_name
from deltaserve.settings.worker_list import parse_worker


async def _watch_for_a_moment(source: str, is_asked: threading.Event) -> None:
    def listener(source: str, entries: object) -> None:
        raise AssertionError("nothing was answered")

    watch = (
        watch_name(parse_worker("prefill@prefill.svc:8998"), listener)
        if source == "name"
        else watch_file(Path("workers"), listener)
    )
    task = asyncio.create_task(watch)
    while not is_asked.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _silent(is_asked: threading.Event) -> Callable[..., Any]:
    def ask(*_: object, **__: object) -> None:
        is_asked.set()
        threading.Event().wait()

    return ask


def main(source: str) -> None:
    is_asked = threading.Event()
    with asyncio.Runner() as runner:  # uvloop would look names up past Python
        if source == "name":
            socket.getaddrinfo = _silent(is_asked)
        else:
            os.open = _silent(is_asked)
        runner.run(_watch_for_a_moment(source, is_asked))
    print("the loop is closed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
