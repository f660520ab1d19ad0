"""Work that may wait without end (for a name server, a network's disk), done where nobody's end waits for it.

An event loop's own threads are no place for it: asyncio joins them without a limit when its loop closes, and so does
the interpreter when it exits.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(name: str, work: Callable[[], Result]) -> Future[Result]:
    """What `work` returns or raises, once it has. The thread keeps no process alive, and goes on though whoever waits
    for it does no more."""
    told: Future[Result] = Future()
    told.set_running_or_notify_cancel()  # who is cancelled takes nothing away from the thread

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            told.set_exception(error)
        else:
            told.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return told
