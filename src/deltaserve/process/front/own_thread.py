"""Work that may wait without end (for a name server, a network's disk), done where nobody's end waits for it.

The event loop's own threads are no place for it: asyncio joins them without a limit when its loop closes, and so does
the interpreter when it exits.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


async def in_own_thread(name: str, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises. A thread whose caller was cancelled is left alone, and keeps no process alive."""
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
    return await asyncio.wrap_future(told)
