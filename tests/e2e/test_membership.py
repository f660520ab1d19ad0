"""Workers join and leave a running router under load: by a file, a name and an operator's call. No answer is wrong or
lost."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from tests.e2e.members import known, members, wait_forgotten, wait_used
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.ports import free_ports

ANSWER_LEN = 40
NUM_USERS = 4


def test_workers_come_and_go_under_load(tiny_models: Path, folder: Path) -> None:
    with members(folder, tiny_models / "llama") as cluster, ThreadPoolExecutor(NUM_USERS) as pool:
        api = cluster.route("--workers-file", str(cluster.list), "--shutdown-grace-s", "1")
        for name in ("prefill-a", "decode-a", "decode-b"):
            cluster.start(name)
        cluster.write("prefill-a", "decode-a")
        router = cluster.parts["router"]
        wait_until(api.is_ready, "readiness", router)
        prompts = [random_prompt(60 + 7 * seed, seed=seed) for seed in range(6)]
        answers = [api.complete(prompt, ANSWER_LEN) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(cluster.model, prompt, answer)
        is_over, num_right = Event(), [0] * NUM_USERS

        def use(user: int) -> None:
            while not is_over.is_set():
                for prompt, answer in zip(prompts[user:], answers[user:], strict=True):
                    assert api.complete(prompt, ANSWER_LEN).tokens == answer.tokens
                    num_right[user] += 1

        def go_on(users: list[Future[None]]) -> None:
            """Until every user has had another answer; at once when one has failed."""
            before = list(num_right)

            def have_gone_on() -> bool:
                return any(user.done() for user in users) or all(map(int.__gt__, num_right, before))

            wait_until(have_gone_on, "answers", router)

        users = [pool.submit(use, user) for user in range(NUM_USERS)]
        try:
            go_on(users)
            cluster.write("prefill-a", "decode-a", "decode-b")  # one joins,
            wait_used(api, "decode-b", router)
            go_on(users)
            cluster.write("prefill-a", "decode-b")  # one leaves and ends,
            wait_forgotten(api, "decode-a", router)
            assert cluster.parts["decode-a"].end() == 0
            go_on(users)
            cluster.start("prefill-b")  # the other half is exchanged,
            cluster.write("prefill-a", "prefill-b", "decode-b")
            wait_used(api, "prefill-b", router)
            cluster.write("prefill-b", "decode-b")
            wait_forgotten(api, "prefill-a", router)
            assert cluster.parts["prefill-a"].end() == 0
            go_on(users)
            cluster.start("decode-c")  # and one comes by call, when the only other one is killed
            reply = api.http.post("/admin/workers/join", json={"worker": cluster.entries["decode-c"]})
            assert (reply.status_code, reply.json()["worker"]) == (202, "decode-c")
            wait_used(api, "decode-c", router)
            cluster.parts["decode-b"].kill()
            go_on(users)
        finally:
            is_over.set()
        for user in users:
            user.result()
        assert set(known(api)) == {"prefill-b", "decode-b", "decode-c"}
        assert "decode-a has left" in router.log()
        for name in ("router", "prefill-b", "decode-c"):
            assert cluster.parts[name].end() == 0, cluster.parts[name].tail()


def test_workers_behind_a_name(tiny_models: Path, folder: Path) -> None:
    """Every address of a service's name is a worker, called by that address."""
    with members(folder, tiny_models / "llama") as cluster:
        ports = dict(zip(("prefill", "decode"), free_ports(2), strict=True))
        services = ",".join(f"{role}@localhost:{port}" for role, port in ports.items())
        api = cluster.route("--workers-dns", services)
        for role, port in ports.items():
            cluster.worker(role, "--advertise", "127.0.0.1", port=port)
        wait_until(api.is_ready, "readiness", cluster.parts["router"])
        assert set(known(api)) == {f"{role}-127.0.0.1:{port}" for role, port in ports.items()}
        prompt = random_prompt(100, seed=1)
        assert_true(cluster.model, prompt, api.complete(prompt, 6))
