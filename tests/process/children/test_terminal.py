"""What a supervised process tells its user of its log."""

import io
import json
import logging

from deltaserve.process.children.terminal import ForUser, JsonLines, LinesForUser, say_in_json


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


def test_a_clock_that_is_set_back_hides_no_warning() -> None:
    told: list[str] = []
    handler = ForUser(told.append)
    for at in (5000.0, 5000.1, 1000.0):
        for _ in range(21):
            handler.emit(record(logging.WARNING, "x", at))
    assert told[-1] == "more warnings than fit here: the log has them"
    assert len(told) == 2 * 21


def test_a_process_without_a_supervisor_writes_lines_of_one_form() -> None:
    form = LinesForUser("router")
    assert form.format(record(logging.INFO, "requests go to decode-0 again", at=0.0)) == (
        "deltaserve: router: requests go to decode-0 again"
    )
    warning = form.format(record(logging.WARNING, "no requests for now to decode-0", at=0.0))
    assert warning.startswith("deltaserve: router: ") and warning.endswith(
        ":00 WARNING no requests for now to decode-0"
    )
    first, *rest = form.format(record(logging.ERROR, "met a bug", at=0.0, error=ValueError("deep"))).splitlines()
    assert first.endswith("ERROR met a bug") and rest[-1] == "ValueError: deep"


def test_json_lines_have_one_shape_whoever_wrote_them() -> None:
    written = JsonLines("decode-0").format(record(logging.WARNING, "two\nlines", at=86400.25))
    assert "\n" not in written
    assert json.loads(written) == {
        "time": "1970-01-02T00:00:00.250Z",
        "level": "warning",
        "process": "decode-0",
        "logger": "x",
        "thread": "MainThread",
        "message": "two\nlines",
    }
    stream = io.StringIO()
    say_in_json("serve", stream)("decode-0: ended\n    its last line")
    said = json.loads(stream.getvalue())
    assert (said["process"], said["level"]) == ("serve", "info")
    assert said["message"] == "decode-0: ended\n    its last line"
    assert stream.getvalue().count("\n") == 1


def test_json_lines_keep_fields_and_tracebacks_apart_from_text() -> None:
    log, stream = logging.Logger("x"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("front"))
    log.addHandler(handler)
    log.info('{"id": "cmpl-1"}', extra={"fields": {"id": "cmpl-1", "cached": 3}})
    try:
        raise ValueError("deep")
    except ValueError:
        log.exception("met a bug")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["fields"] == {"id": "cmpl-1", "cached": 3}
    assert "message" not in first
    assert second["message"] == "met a bug"
    assert "ValueError: deep" in second["traceback"]
