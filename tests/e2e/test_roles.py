"""Workers that change roles while they serve: every answer is right, and what was cached is hit in the new role."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.e2e.questions import RECALL_MODEL, ask_about
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Answer, Server, serving, wait_until

PAGE = 4
MAX_TRIES = 20
FLAGS = ("--page-size", str(PAGE), "--num-pages", "1024", "--prefill", "1", "--decode", "2")
HEAD = random_prompt(10 * PAGE, seed=1)


@pytest.fixture(scope="module")
def three(tiny_models: Path) -> Iterator[Server]:
    """One prefill and two decode workers, whose roles change."""
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path,
        serving(Path(path), tiny_models / "llama", *FLAGS) as server,
    ):
        yield server


def wait_for_reports(server: Server) -> None:
    """Until the front knows that everybody can serve: it refuses to take the last worker of a role that does."""
    wait_until(lambda: all(worker["status"] for worker in server.workers().values()), "everybody's report")


def ask_for(server: Server, worker: str, role: str, **fields: object) -> httpx.Response:
    return server.http.post("/admin/role", json={"worker": worker, "role": role, **fields})


def change(server: Server, worker: str, role: str, **fields: object) -> None:
    """Wait until the front sends it requests of its new role."""
    pages, boots = server.workers()[worker]["resident_keys"], server.log().count("worker now; its cache stays")
    reply = ask_for(server, worker, role, **fields)
    assert (reply.status_code, reply.json()["changing"]) == (202, True), reply.text
    wait_until(lambda: server.log().count("worker now; its cache stays") > boots, "the new engine", server)

    def is_used() -> bool:
        known = server.workers()[worker]
        return bool(known["role"] == role and known["state"] == "ready" and known["status"])

    wait_until(is_used, f"{worker} as a {role} worker", server)
    assert server.workers()[worker]["resident_keys"] >= pages


def test_roles_change_under_traffic_and_caches_stay(tiny_models: Path, three: Server) -> None:
    """And back, as they were."""
    model, server = tiny_models / "llama", three
    prompts = [[*HEAD, *random_prompt(3 + i, seed=10 + i)] for i in range(8)]
    with ThreadPoolExecutor(4) as pool:

        def traffic() -> None:
            """All of the prompts, some at a time: every answer is that of transformers."""
            for prompt, answer in zip(prompts, pool.map(lambda p: server.complete(p, 24), prompts), strict=True):
                assert_true(model, prompt, answer)

        traffic()
        wait_for_reports(server)
        wait_until(lambda: any(known(server)[name] for name in ("decode-0", "decode-1")), "reports of cached pages")
        first = max(("decode-0", "decode-1"), key=lambda name: known(server)[name])
        under_way = pool.submit(server.complete, prompts[0], 200)
        change(server, first, "prefill")
        assert_true(model, prompts[0], under_way.result())
        traffic()
        change(server, "prefill-0", "decode")  # the other one computes all prompts now
        answer = server.complete([*HEAD, 1, 2, 3], 4)
        assert_true(model, [*HEAD, 1, 2, 3], answer)
        assert answer.timings["prefill_cached_tokens"] >= len(HEAD)
        assert answer.cached_len > 0
        assert ask_for(server, first, "prefill").status_code == 200
        refused = ask_for(server, first, "decode")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "role_refused")
        change(server, "prefill-0", "prefill")
        change(server, first, "decode")
        traffic()
        roles = {name: worker["role"] for name, worker in server.workers().items()}
        assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


def test_an_answer_that_runs_longer_than_the_grace_goes_on_elsewhere(tiny_models: Path, three: Server) -> None:
    """One of the decode workers is a prefill worker afterwards."""
    model, server = tiny_models / "llama", three
    with ThreadPoolExecutor(1) as pool:
        for _ in range(MAX_TRIES):
            server.wait_quiet()  # else a report of earlier traffic names a worker that has nothing to do any more
            before = num_retried(server)
            under_way = pool.submit(server.complete, HEAD, 2000)  # many times as long as it takes to ask
            name = wait_busy(server, under_way)
            if name is not None:
                change(server, name, "prefill", grace_s=0)
            assert_true(model, HEAD, under_way.result())
            if num_retried(server) > before:
                break
            if name is not None:  # it had been answered before it was asked
                change(server, name, "decode")
        assert num_retried(server) == before + 1


@pytest.mark.parametrize("staging", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_worker_of_several_ranks_changes_its_role(folder: Path, staging: str) -> None:
    """Two ranks write to one, beside one that writes to another, then one writes to two: each time with traffic."""
    flags = ["--prefill-tp-size", "2", "--chunked-prefill-size", "64"]
    asked = ask_about(6, 4, 24, seed=1)
    with serving(folder, RECALL_MODEL, *FLAGS, *flags, "--staging", staging) as server, ThreadPoolExecutor(4) as pool:

        def traffic() -> list[Future[Answer]]:
            return [pool.submit(server.complete, one.prompt, len(one.answer)) for one in asked]

        def check(answers: list[Future[Answer]]) -> None:
            assert [answer.result().tokens for answer in answers] == [one.answer for one in asked]

        check(traffic())
        wait_for_reports(server)
        for worker, role in (
            ("decode-0", "prefill"),
            ("prefill-0", "decode"),
            ("prefill-0", "prefill"),
            ("decode-0", "decode"),
        ):
            under_way = traffic()
            change(server, worker, role)
            check(under_way)
            check(traffic())


def busy(server: Server) -> str | None:
    """The decode worker that has a running request."""
    workers = server.workers().values()
    return next((w["name"] for w in workers if w["role"] == "decode" and (w["status"] or {}).get("num_running")), None)


def wait_busy(server: Server, under_way: Future[Answer]) -> str | None:
    """The decode worker that has the request; None: none was met with it before the answer came."""
    found: list[str] = []

    def is_known() -> bool:
        found.extend(name for name in [busy(server)] if name is not None)
        return bool(found) or under_way.done()

    wait_until(is_known, "the first tokens", server)
    return found[0] if found else None


def num_retried(server: Server) -> int:
    """Requests that went on elsewhere, since their decode worker had given them up."""
    return int(server.info()["engine"]["counts"].get("retried_decode", 0))


def known(server: Server) -> dict[str, int]:
    """Worker |-> page keys the front knows to be there."""
    return {name: worker["resident_keys"] for name, worker in server.workers().items()}
