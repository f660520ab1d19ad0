"""Python's collector in a process that serves: what was loaded is not looked at again."""

import gc


def keep_loaded() -> None:
    """Take all objects that are there now out of every later collection; call it before the first request.

    A worker has 200,000 of them, nearly all of torch: a full collection looks at each with the interpreter lock held,
    0.1 to 0.3 s in which no token goes out. It comes when a quarter as many new objects have grown old as the last one
    left alive, so the last collection here is of nothing: cycles of requests are freed after thousands, not after
    tens of megabytes of them.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
