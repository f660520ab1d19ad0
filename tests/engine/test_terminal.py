"""What a supervised process tells its user of its log."""

import logging

from deltaserve.engine.terminal import ForUser


def record(level: int, text: str, at: float, error: BaseException | None = None) -> logging.LogRecord:
    made = logging.LogRecord("x", level, "x.py", 1, text, None, (type(error), error, None) if error else None)
    made.created = at
    return made


def test_warnings_and_worse_are_told_in_one_line_each() -> None:
    told: list[str] = []
    log = logging.Logger("x")
    log.addHandler(ForUser(told.append))
    log.info("a request ended")
    log.warning("request field %r is unknown", "maxtokens")
    log.error("request met a bug", exc_info=ValueError("deep"))
    assert [line[9:] for line in told] == ["WARNING request field 'maxtokens' is unknown", "ERROR request met a bug"]
    assert [line[2:6:3] for line in told] == ["::", "::"]


def test_a_flood_is_cut_and_told_so_once() -> None:
    told: list[str] = []
    handler = ForUser(told.append)
    for i in range(100):
        handler.emit(record(logging.WARNING, f"no {i}", at=1000.0 + i / 100))
    assert len(told) == 21
    assert told[-1] == "more warnings than fit here: the log has them"
    handler.emit(record(logging.WARNING, "later", at=1010.0))
    assert told[-1].endswith("WARNING later")
