"""Other shapes of a server: unified, several workers, no caches, other types, parts started by hand; and namespaces."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from deltaserve.core.layout.dtype import DType
from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_true, page_bytes, random_prompt
from tests.e2e.server import Api, Process, environment, serving, wait_until
from tests.patience import PATIENCE_S, killed_if_late
from tests.ports import free_port, free_ports

PAGES = ("--page-size", "16")
FLAGS = (*PAGES, "--chunked-prefill-size", "32", "--num-pages", "256")
CHECKED = (*FLAGS, "--verify", "crc")
ROWS = {"prefill": "4", "decode": "16"}
BF16_TOLERANCE = 0.25
FP8_TOLERANCE = 0.5
"""Log-probabilities of the tiny models spread over some 20; wrong pages change them by several."""

ON_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it (nohup)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "deltaserve.cli.main", *sys.argv[1:]])
"""


def test_unified(tiny_models: Path, folder: Path) -> None:
    """One worker does both; the second turn is found, nothing is transferred."""
    model = tiny_models / "qwen3_moe"
    with serving(folder, model, *FLAGS, "--disaggregation-mode", "null") as server:
        assert list(server.workers()) == ["unified-0"]
        prompts = [random_prompt(50 + i, seed=i) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, 20, prompt_logprobs=0), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(model, prompt, answer)
            assert answer.timings["transferred_bytes"] == 0
        turn = [*prompts[0], *answers[0].tokens, 5]
        second = server.complete(turn, 4)
        assert_true(model, turn, second)
        assert second.cached_len == (len(turn) - 2) // 16 * 16


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_next"])
def test_deterministic_inference(tiny_models: Path, folder: Path, name: str) -> None:
    """The same to the last bit cold, behind a cached prefix, in other chunks, beside others and on workers of another
    shape."""
    prompts, seen = [random_prompt(130 + row, seed=row) for row in range(4)], []
    shapes = (("--chunked-prefill-size", "96"), ("--chunked-prefill-size", "32", "--disaggregation-mode", "null"))
    for shape in shapes:
        flags = (*PAGES, "--num-pages", "256", *shape, "--enable-deterministic-inference")
        with serving(folder, tiny_models / name, *flags) as server, ThreadPoolExecutor(4) as pool:
            seen.append([server.complete(prompt, 20) for prompt in prompts])
            seen.append(list(pool.map(lambda prompt: server.complete(prompt, 20), prompts)))
            turns = [[*prompt, *answer.tokens[:10]] for prompt, answer in zip(prompts, seen[0], strict=True)]
            seen.append([server.complete(turn, 10) for turn in turns])
    cold, warm, turned, *_ = seen
    assert [answer.cached_len for answer in cold] == [0] * 4
    assert all(answer.cached_len >= 128 for answer in [*warm, *turned])
    for run in seen:
        for answer, want in zip(run, cold, strict=True):
            count = len(answer.tokens)
            assert answer.tokens == want.tokens[-count:]
            assert (answer.logprobs, answer.tops) == (want.logprobs[-count:], want.tops[-count:])


def test_conditional_prefill(tiny_models: Path, folder: Path) -> None:
    """Short deltas are computed where it is sooner, by this machine's pace: the answers are the same on either side."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--conditional-prefill", "auto") as server:
        turn = random_prompt(100, seed=1)
        for length in (1, 3, 10, 40):
            answer = server.complete(turn, 12, prompt_logprobs=0 if length == 10 else None)
            assert_true(model, turn, answer)
            turn = [*turn, *answer.tokens, *random_prompt(length, seed=length)]


def test_on_shared_cores_decode_computes_long_prompts_too(tiny_models: Path, folder: Path) -> None:
    """Two workers of a machine without GPUs share its cores where it has two or more; with a target for the time
    between tokens prefill computes them."""
    model, prompt = tiny_models / "llama", random_prompt(300, seed=1)
    auto = ("--page-size", "16", "--num-pages", "256", "--conditional-prefill", "auto")
    shares = "share this machine's cores"
    for flags, moves in (((), False), (("--itl-target-ms", "100", "--decode-extend-tokens", "64"), True)):
        with serving(folder / str(moves), model, *auto, *flags) as server:
            answer = server.complete(prompt, 12)
            assert_true(model, prompt, answer)
            assert (shares in server.log()) is not moves
            assert (answer.timings["transferred_bytes"] > 0) is moves


def test_two_and_two(tiny_models: Path, folder: Path) -> None:
    """All four work, and a second turn goes where its prefix is."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--prefill", "2", "--decode", "2") as server:
        wait_until(lambda: all(worker["state"] == "ready" for worker in server.workers().values()), "all four", server)
        prompts = [random_prompt(200, seed=i) for i in range(12)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, 30), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(model, prompt, answer)
        wait_until(
            lambda: all(worker.get("deltaserve_steps_total", 0) > 0 for worker in server.metrics().values()),
            "steps of all four, as their reports tell",
            server,
        )
        server.wait_quiet()
        for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
            turn = [*prompt, *answer.tokens, 9]
            second = server.complete(turn, 4)
            assert_true(model, turn, second)
            assert second.cached_len >= 192, "computing it again would cost more than moving it"


def test_keys_of_two_tenants_do_not_share(tiny_models: Path, folder: Path) -> None:
    """With keys the admin routes are on the next port, and nobody without a key is answered."""
    model = tiny_models / "llama"
    keys = {name: secrets.token_urlsafe(32) for name in ("one", "two")}
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text("".join(f"{key} {name}\n" for name, key in keys.items()))
    port = free_port()
    server = Process(folder, "serve", str(model), "--port", str(port), *CHECKED, "--api-key-file", str(path))
    try:
        server.wait_for_log("all processes are ready")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            body = Api.body_of("llama", random_prompt(100, seed=1), max_tokens=4)

            def hit(name: str) -> int:
                reply = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {keys[name]}"})
                cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

            assert [hit(name) for name in ("one", "two", "one", "two")] == [0, 0, 96, 96]
            assert http.post("/v1/completions", json=body).status_code == 401
            facts = http.get("/server_info", headers={"authorization": f"Bearer {keys['one']}"}).json()
            assert "served_model_name" in facts and "engine" not in facts
        assert server.end() == 0
    finally:
        server.kill()


def test_without_decodes_cache_every_prompt_is_moved_whole(tiny_models: Path, folder: Path) -> None:
    """Prefill finds the prefix all the same: the two halves of an A/B run differ in decode's cache alone."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--disable-decode-radix-cache") as server:
        prompt = random_prompt(100, seed=1)
        for prefill_cached in (0, 96):
            answer = server.complete(prompt, 6)
            assert_true(model, prompt, answer)
            assert answer.timings["decode_cached_tokens"] == 0
            assert answer.timings["prefill_cached_tokens"] == prefill_cached
            assert answer.timings["transferred_bytes"] > moved(model, 100, 0, DType.FLOAT32)
        assert server.wait_quiet()["decode-0"]["status"]["metrics"]['deltaserve_pages{pool="0",state="cached"}'] == 0


def test_bfloat16(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama_bf16"
    with serving(folder, model, *FLAGS) as server:
        for length in (5, 64, 100):
            prompt = random_prompt(length, seed=length)
            for cached in (0, length // 16 * 16):
                answer = server.complete(prompt, 12)
                assert answer.cached_len == cached
                assert_true(model, prompt, answer, BF16_TOLERANCE)
                assert answer.timings["transferred_bytes"] - moved(model, length, cached, DType.BFLOAT16) > 0


def test_fp8_pages(tiny_models: Path, folder: Path) -> None:
    """A quarter of the bytes; answers near those of full pages, and no further away from the cache than when cold."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--kv-cache-dtype", "fp8_e4m3") as server:
        for length in (5, 64, 100):
            prompt = random_prompt(length, seed=length)
            for cached in (0, length // 16 * 16):
                answer = server.complete(prompt, 12)
                assert answer.cached_len == cached
                assert_true(model, prompt, answer, FP8_TOLERANCE)
                payload = answer.timings["transferred_bytes"] - moved(model, length, cached, DType.FP8_E4M3)
                assert 0 < payload < MAX_PAYLOAD_BYTES


def moved(model: Path, length: int, cached: int, kv_dtype: DType) -> int:
    """Bytes of the pages beyond the hit."""
    return (-(-length // 16) - cached // 16) * page_bytes(model, 16, kv_dtype)


@contextmanager
def by_hand(folder: Path, model: Path, *flags: str) -> Iterator[tuple[Api, dict[str, Process]]]:
    """`prefill`, `decode` and `router` as three commands that share a key file, of unequal sizes."""
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_urlsafe(48))
    ports = dict(zip(("prefill", "decode", "router"), free_ports(3), strict=True))
    parts: dict[str, Process] = {}
    with ExitStack() as stack:
        for role in ("prefill", "decode"):
            link = ["--disaggregation-bootstrap-port", str(ports[role]), "--cluster-key-file", str(key)]
            rows = ["--max-running-requests", ROWS[role]]
            parts[role] = Process(folder / role, role, str(model), *link, *rows, *flags)
            stack.callback(parts[role].kill)
        workers = f"prefill@127.0.0.1:{ports['prefill']},decode@127.0.0.1:{ports['decode']}"
        front = ["--workers", workers, "--port", str(ports["router"]), "--cluster-key-file", str(key)]
        parts["router"] = Process(folder / "router", "router", str(model), *front, *PAGES)
        stack.callback(parts["router"].kill)
        api = Api(f"http://127.0.0.1:{ports['router']}", model.name)
        stack.callback(api.http.close)
        wait_until(api.is_ready, "readiness", parts["router"])
        yield api, parts


def test_parts_started_by_hand(tiny_models: Path, folder: Path) -> None:
    """Two routers share the workers, one of another cluster may not; a death is noticed, a new process is found."""
    model = tiny_models / "llama"
    with by_hand(folder, model, *CHECKED) as (api, parts), ExitStack() as stack:
        check_other_routers(model, folder, api, parts, stack)
        prompt = random_prompt(100, seed=11)
        for cached in (0, 96):
            answer = api.complete(prompt, 6)
            assert_true(model, prompt, answer)
            assert answer.cached_len == cached
        check_death(model, folder, api, parts, stack)
        for name in ("second", "router", "decode", "prefill"):
            assert parts[name].end() == 0, parts[name].tail()
            log = parts[name].log()
            is_worker = name in ("decode", "prefill")
            assert log.startswith(
                "deltaserve: " if is_worker else f"deltaserve: router of {model}: will serve at http://"
            )
            assert "requests in flight may end within 30 s (" in log
            assert "uvicorn" not in log
            assert log.count(": loading ") == is_worker
        assert not list(folder.rglob("deltaserve-*")), "no spec stays behind, whoever ended how"


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.wide), "decode"])
def test_nobody_waits_for_a_worker_by_hand_that_was_asked_to_end(tiny_models: Path, folder: Path, role: str) -> None:
    """Each of them is idle, and ends before its next heartbeat."""
    with by_hand(folder, tiny_models / "llama", *CHECKED) as (api, parts):
        api.complete(random_prompt(20, seed=1), 2)
        assert parts[role].end() == 0, parts[role].tail()
        reply = api.http.post("/v1/completions", json=api.body(random_prompt(20, seed=2), max_tokens=2))
        assert (reply.status_code, f"not ready: {role}-" in reply.text) == (503, True), reply.text


def check_other_routers(model: Path, folder: Path, first: Api, parts: dict[str, Process], stack: ExitStack) -> None:
    """One of this cluster, which becomes the part `second`, and one of another, which is told why not."""
    stranger_key = folder / "stranger.key"
    stranger_key.touch(mode=0o600)
    stranger_key.write_text(secrets.token_urlsafe(48))
    argv = list(parts["router"].argv)

    def another(name: str, **changed: str) -> tuple[Api, Process]:
        for flag, value in {"port": str(free_port()), **changed}.items():
            argv[argv.index(f"--{flag.replace('_', '-')}") + 1] = value
        process = Process(folder / name, *argv)
        stack.callback(process.kill)
        api = Api(f"http://127.0.0.1:{argv[argv.index('--port') + 1]}", model.name)
        stack.callback(api.http.close)
        return api, process

    second, parts["second"] = another("second")
    wait_until(second.is_ready, "readiness", parts["second"])
    for seed in range(4):
        prompt = random_prompt(100, seed=seed)
        for api in (first, second):
            assert_true(model, prompt, api.complete(prompt, 6))
    _, stranger = another("stranger", cluster_key_file=str(stranger_key))
    stranger.wait_for_log("ends every handshake: another cluster key there")
    assert first.is_ready()
    assert second.is_ready()
    stranger.end()


def check_death(model: Path, folder: Path, api: Api, parts: dict[str, Process], stack: ExitStack) -> None:
    """Without a supervisor the broken connection tells of it; a new process on the same port is found."""
    old = parts["prefill"]
    old.kill()
    wait_until(lambda: not api.is_ready(), "the loss to be noticed")
    parts["prefill"] = Process(folder / "again", *old.argv)
    stack.callback(parts["prefill"].kill)
    wait_until(api.is_ready, "readiness", parts["prefill"])
    other = random_prompt(120, seed=12)
    assert_true(model, other, api.complete(other, 6))


@pytest.mark.slow
def test_workers_of_other_models_are_refused_with_both_values(tiny_models: Path, folder: Path) -> None:
    """The router says why it is not ready; it never pairs them."""
    with by_hand_mixed(folder, tiny_models) as api:

        def reasons() -> str:
            try:
                return api.http.get("/readyz").text
            except httpx.TransportError:
                return ""

        wait_until(lambda: "cluster secret or model: ours" in reasons(), "the refusal")
        assert not api.is_ready()


@contextmanager
def by_hand_mixed(folder: Path, tiny_models: Path) -> Iterator[Api]:
    """Prefill has another model than decode and the router."""
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_urlsafe(48))
    ports = free_ports(3)
    secret = ["--cluster-key-file", str(key)]
    commands = [
        ["prefill", str(tiny_models / "llama_bias_mha"), "--disaggregation-bootstrap-port", str(ports[0])],
        ["decode", str(tiny_models / "llama"), "--disaggregation-bootstrap-port", str(ports[1])],
        ["router", str(tiny_models / "llama"), "--port", str(ports[2])],
    ]
    commands[2] += ["--workers", f"prefill@127.0.0.1:{ports[0]},decode@127.0.0.1:{ports[1]}"]
    with ExitStack() as stack:
        for command in commands:
            flags = PAGES if command[0] == "router" else CHECKED
            process = Process(folder / command[0], *command, *secret, *flags)
            stack.callback(process.kill)
        api = Api(f"http://127.0.0.1:{ports[2]}", "llama")
        stack.callback(api.http.close)
        yield api


def test_nothing_listens_beyond_this_machine_and_nothing_is_left(tiny_models: Path, folder: Path) -> None:
    """Every listening socket of every process, the transport's too, is on a loopback address. Ctrl-C ends all."""
    with serving(folder, tiny_models / "llama", *FLAGS) as server:
        server.complete([1, 2, 3], 2)
        pids = server.pids()
        assert listening_addresses(pids.values()) == {"0100007F"}
        assert server.end(signal.SIGINT) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
        assert not list(folder.glob("deltaserve-*"))


def test_a_terminal_that_goes_away_ends_all_as_ctrl_c_does(tiny_models: Path, folder: Path) -> None:
    """The hang-up arrives together with errors of everything that is still written to the terminal."""
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-c",
        ON_TERMINAL,
        "serve",
        str(tiny_models / "llama"),
        "--port",
        str(free_port()),
        *FLAGS,
    ]
    popen = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(folder))
    try:
        os.close(theirs)
        said = b""
        with killed_if_late(popen):  # nobody has the terminal then, and reading it raises OSError
            while b"serving at" not in said:
                said += os.read(ours, 4096)
        os.close(ours)
        assert popen.wait(PATIENCE_S) == 0
        assert not list(folder.glob("deltaserve-*"))
    finally:
        popen.kill()
        popen.wait()


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """In hexadecimal, as the kernel lists them."""
    links = (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {os.readlink(link) for link in links if os.path.lexists(link)}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
