"""Figures of a server as a table for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltaserve.commands.top.figures import FileUse, PoolUse, ServerFigures, WorkerFigures
from deltaserve.core.sizes import size

WIDTH = 160
"""Columns, where there is no terminal."""
_BAR_LEN = 24
_NARROW_BAR_LEN = 12
_NUM_NARROW = 6
_NARROW = 120
"""On fewer columns than so many a worker's row has its most important ones alone."""
_ABSENT = "-"
_STATE_STYLES = {"ready": "green", "leaving": "yellow", "draining": "yellow"}


def shown(server: ServerFigures, where: str, width: int = WIDTH) -> RenderableType:
    """The whole picture, for so many columns. `where`: URL of the server."""
    table = _narrow_table(server) if width < _NARROW else _table(server)
    return Group(Text(f"{server.model} at {where}", style="bold"), *map(Text, _lines(server)), table)


def fitted(parts: Sequence[Sequence[str]], num_lines: int) -> Text:
    """Parts below each other in so many lines, each cut to its share of them; lines are as long as the screen is
    wide."""
    found: list[str] = []
    for index, part in enumerate(parts):
        room = (num_lines - len(found)) // (len(parts) - index) - 1
        found += ["", *part] if len(part) <= room else ["", *part[: max(0, room - 1)], f"... {len(part)} lines in all"]
    return Text("\n".join(found[:num_lines]), no_wrap=True, overflow="ellipsis")


def _lines(server: ServerFigures) -> Iterator[str]:
    yield (
        f"requests: {server.running} running, {server.waiting} waiting, {number(server.requests_per_s)}/s done   "
        f"tokens/s: {number(server.prompt_per_s)} of prompts, {number(server.output_per_s)} of answers"
    )
    yield f"first token {seconds(server.ttft_s)}, between tokens {seconds(server.itl_s)} (medians)   {_caches(server)}"


def _caches(server: ServerFigures) -> str:
    share = _ABSENT if server.found_share is None else f"{server.found_share:.0%}"
    saved = f"{number(server.found_tokens)} prompt tokens were on decode already"
    moved = f"{size(int(server.moved_bytes))} moved to these workers"
    return f"caches: {share} of prompt tokens found; {moved}, {saved}"


def _table(server: ServerFigures) -> Table:
    table = _empty_table(("run", "wait", "tokens/s", "step", "in/s"), "pages: # used, = cached, . free")
    has_files = any(worker.file is not None for worker in server.workers)
    if has_files:
        table.add_column("file")
    table.add_column("besides")
    revisions = {worker.revision for worker in server.workers} - {None}
    for worker in server.workers:
        file = [_file(worker.file)] if has_files else []
        table.add_row(*_row(worker), *file, _last(worker, shows_revision=len(revisions) > 1))
    return table


def _empty_table(numbers: Sequence[str], pages: str) -> Table:
    """A worker's columns: who it is, these numbers of it, and its pages under that heading."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "role", "state"):
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    table.add_column(pages, no_wrap=True)
    return table


def _narrow_table(server: ServerFigures) -> Table:
    table = _empty_table(("run", "wait", "tokens/s"), "pages: # used, = cached")
    for worker in server.workers:
        pools = "\n".join(bar(pool, _NARROW_BAR_LEN) for pool in worker.pools)
        table.add_row(*islice(_row(worker), _NUM_NARROW), pools or _ABSENT)
    return table


def _row(worker: WorkerFigures) -> Iterator[RenderableType]:
    yield worker.name
    yield worker.role
    yield Text(worker.state, style=_STATE_STYLES.get(worker.state, "red"))
    yield str(worker.running)
    yield str(worker.waiting)
    yield number(worker.tokens_per_s)
    yield seconds(worker.step_s or None)
    yield _ABSENT if worker.bytes_per_s is None else size(int(worker.bytes_per_s))
    yield "\n".join(map(bar, worker.pools)) or _ABSENT


def _file(file: FileUse | None) -> Text:
    if file is None:
        return Text(_ABSENT)
    if not file.slots:
        return Text("cannot be had", style="red")
    failed = f", {file.failures} failed" if file.failures else ""
    return Text(f"{file.pages} of {file.slots} pages, {size(int(file.loaded_bytes))} back{failed}")


def _last(worker: WorkerFigures, *, shows_revision: bool) -> str:
    revision = [f"revision {worker.revision or 'not told'}"] if shows_revision else []
    return ", ".join([*revision, *_besides(worker)])


def _besides(worker: WorkerFigures) -> Iterator[str]:
    if worker.tickets:
        yield f"{worker.tickets} tickets"
    if worker.evicted_per_s:
        yield f"evicts {number(worker.evicted_per_s)}/s"
    if worker.retractions:
        yield f"{worker.retractions} retractions"
    if worker.quarantined:
        yield f"{worker.quarantined} pages in quarantine"


def bar(pool: PoolUse, length: int = _BAR_LEN) -> str:
    """Shares of a pool, and how many pages it has. What is there at all is seen."""
    if not pool.total:
        return _ABSENT
    used, cached = (max(int(count > 0), round(length * count / pool.total)) for count in (pool.used, pool.cached))
    used = min(used, length - cached) if cached < length else 0
    return f"{'#' * used}{'=' * cached}{'.' * (length - used - cached)} {pool.total}"


def number(value: float | None) -> str:
    """A count or a rate, three digits of it."""
    if value is None:
        return _ABSENT
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if value >= limit:
            return f"{value / (1000 if unit == 'K' else limit):.3g}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A time, in milliseconds where it is short."""
    if value is None:
        return _ABSENT
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
