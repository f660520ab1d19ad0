"""A file under the cache, with real processes: prompts that evict each other come back from it and are not computed."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Process, Server, serving, wait_until
from tests.patience import PATIENCE_S

PAGE = 16
FLAGS = ("--page-size", str(PAGE), "--chunked-prefill-size", "64", "--attention-split-tokens", str(PAGE))
LITTLE = (*FLAGS, "--num-pages", "24")
FILE = ("--cache-dir", "pages", "--cache-dir-mib", "64")
PROMPTS = [random_prompt(17 * PAGE + 3, seed=seed) for seed in range(4)]
"""Any two of them are more than a worker's memory holds."""
LOADED = "deltaserve_tier_tokens_loaded_total"
STORED = "deltaserve_tier_pages_stored_total"
SLOTS = "deltaserve_tier_slots"
COMPUTED = "deltaserve_computed_tokens_total"


def total(server: Server, name: str) -> float:
    return sum(metrics.get(name, 0.0) for metrics in server.metrics().values())


def serve_all(server: Server, model: Path, tail: int) -> int:
    """Every prompt with another last token; how many tokens were computed for it."""
    before = total(server, COMPUTED)
    for prompt in PROMPTS:
        turn = [*prompt, tail]
        assert_true(model, turn, server.complete(turn, 4))
    server.wait_quiet()
    return int(total(server, COMPUTED) - before)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ()),
        pytest.param("qwen3_moe", ("--disaggregation-mode", "null"), marks=pytest.mark.wide),
        pytest.param("deepseek_v3", ("--tp-size", "2"), marks=pytest.mark.wide),
        ("llama", ("--prefill-tp-size", "2")),
        pytest.param("gemma3_text", (), marks=pytest.mark.wide),
        ("qwen3_next", ("--disaggregation-mode", "null")),
    ],
    ids=["pair", "moe, unified", "latent, two ranks", "heads of two ranks", "windows", "states, unified"],
)
def test_what_was_evicted_comes_back_from_the_file(
    tiny_models: Path, folder: Path, family: str, flags: tuple[str, ...]
) -> None:
    model = tiny_models / family
    (folder / "pages").mkdir(parents=True)
    with serving(folder, model, *LITTLE, *FILE, *flags) as server:
        first = serve_all(server, model, 1)
        assert first > len(PROMPTS) * 17 * PAGE
        wait_until(lambda: total(server, STORED) >= len(PROMPTS) * 17, "all pages in the file", server)
        second = serve_all(server, model, 2)
        assert second < first / 4
        num_pages = 16 if family == "qwen3_next" else 17  # of a state, up to the last checkpoint
        assert total(server, LOADED) >= len(PROMPTS) * num_pages * PAGE
        assert total(server, "deltaserve_tier_failures_total") == 0
        assert not list((folder / "pages").iterdir())  # nobody else can open it


def test_without_a_file_everything_is_computed_again(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama"
    with serving(folder, model, *LITTLE) as server:
        assert serve_all(server, model, 1) <= serve_all(server, model, 2)
        assert not any("tier" in name for metrics in server.metrics().values() for name in metrics)


def test_a_file_that_is_spoiled_is_not_believed(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama"
    (folder / "pages").mkdir(parents=True)
    with serving(folder, model, *LITTLE, *FILE) as server:
        first = serve_all(server, model, 1)
        wait_until(lambda: total(server, STORED) >= len(PROMPTS) * 17, "all pages in the file", server)
        for name in ("prefill-0", "decode-0"):
            spoil(server.pid(name), folder / "pages")
        assert serve_all(server, model, 2) >= first
        assert total(server, LOADED) == 0
        assert total(server, "deltaserve_tier_failures_total") > 0
        (log,) = folder.glob("deltaserve-*/decode-0.log")
        assert "does not hold the page that was stored there" in log.read_text()


def spoil(pid: int, folder: Path) -> None:
    """Other bytes in every slot of a worker's file."""
    (file,) = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd).startswith(str(folder))]
    with file.open("r+b") as spoiled:
        content = bytearray(spoiled.read())
        content[100::256] = bytes(byte ^ 0x5A for byte in content[100::256])
        spoiled.seek(0)
        spoiled.write(content)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--prefill-tp-size", "2"), marks=pytest.mark.wide)], ids=["one rank", "two ranks"]
)
def test_a_worker_that_starts_again_without_its_folder_serves_on(
    tiny_models: Path, folder: Path, flags: tuple[str, ...]
) -> None:
    model = tiny_models / "llama"
    (folder / "pages").mkdir(parents=True)
    with serving(folder, model, *LITTLE, *FILE, *flags, deaths=2) as server:
        serve_all(server, model, 1)
        (folder / "pages").rmdir()
        server.signal("prefill-0", signal.SIGKILL)
        server.wait_back("prefill-0")
        serve_all(server, model, 2)
        assert {name: values[SLOTS] > 0 for name, values in server.metrics().items()} == {
            "prefill-0": False,
            "decode-0": True,
        }
        assert "without a file under its cache" in server.log()
        (folder / "pages").mkdir()
        server.signal("prefill-0", signal.SIGKILL)
        server.wait_back("prefill-0")
        serve_all(server, model, 3)
        assert all(values[SLOTS] > 0 for values in server.metrics().values())


@pytest.mark.parametrize(("where", "told"), [("no/such", "No such file"), (".", "no space for it")])
def test_what_cannot_be_had_is_told_in_a_line(tiny_models: Path, folder: Path, where: str, told: str) -> None:
    num_mib = (shutil.disk_usage(folder).free >> 20) + 1024
    flags = ("--num-pages", "24", "--cache-dir", where, "--cache-dir-mib", str(num_mib))
    argv = ["serve", str(tiny_models / "llama"), *FLAGS, *flags]
    process = Process(folder, *argv)
    try:
        assert process.popen.wait(PATIENCE_S) == 2, process.tail()
        assert told in process.log()
        assert "Traceback" not in process.log()
    finally:
        process.kill()
