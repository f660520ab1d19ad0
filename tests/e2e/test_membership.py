"""Workers join and leave a running router under load: by a file, a name and an operator's call. No answer is wrong or
lost."""

from pathlib import Path

from tests.e2e.members import asking, known, members, wait_forgotten, wait_used
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_logged, wait_until
from tests.ports import free_ports

ANSWER_LEN = 40
NUM_USERS = 4


def test_workers_come_and_go_under_load(tiny_models: Path, folder: Path) -> None:
    with members(folder, tiny_models / "llama") as cluster:
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

        def ask(user: int, number: int) -> None:
            at = user + number % (len(prompts) - user)
            assert api.complete(prompts[at], ANSWER_LEN).tokens == answers[at].tokens

        with asking(NUM_USERS, ask, router) as go_on:
            go_on(1)
            cluster.write("prefill-a", "decode-a", "decode-b")  # one joins,
            wait_used(api.http, "decode-b", router)
            go_on(1)
            cluster.write("prefill-a", "decode-b")  # one leaves and ends,
            wait_forgotten(api.http, "decode-a", router)
            assert cluster.parts["decode-a"].end() == 0
            go_on(1)
            cluster.start("prefill-b")  # the other half is exchanged,
            cluster.write("prefill-a", "prefill-b", "decode-b")
            wait_used(api.http, "prefill-b", router)
            cluster.write("prefill-b", "decode-b")
            wait_forgotten(api.http, "prefill-a", router)
            assert cluster.parts["prefill-a"].end() == 0
            go_on(1)
            cluster.start("decode-c")  # and one comes by call, when the only other one is killed
            reply = api.http.post("/admin/workers/join", json={"worker": cluster.entries["decode-c"]})
            assert (reply.status_code, reply.json()["worker"]) == (202, "decode-c")
            wait_used(api.http, "decode-c", router)
            cluster.parts["decode-b"].kill()
            go_on(1)
        assert set(known(api.http)) == {"prefill-b", "decode-b", "decode-c"}
        wait_logged("decode-a has left", router)
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
        assert set(known(api.http)) == {f"{role}-127.0.0.1:{port}" for role, port in ports.items()}
        prompt = random_prompt(100, seed=1)
        assert_true(cluster.model, prompt, api.complete(prompt, 6))
