"""Another revision of a model takes over under load: every answer is one revision's, whole; none is lost, and no worker
of one meets one of the other."""

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

from safetensors.torch import load_file, save_file

from tests.e2e.members import Members, known, members, wait_forgotten, wait_used
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Api, wait_until

ANSWER_LEN = 40
NUM_USERS = 3
OLD = ("prefill-a", "decode-a", "decode-b")
NEW = ("prefill-n", "decode-n")
_ESTABLISHED = "01"


def next_revision(model: Path, folder: Path) -> Path:
    """The same model with other weights."""
    path = folder / model.name
    shutil.copytree(model, path)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    mixed = [name for name in tensors if name.endswith("down_proj.weight")]
    save_file(tensors | {name: tensors[name].flip(0).contiguous() for name in mixed}, weights)
    return path


def connected(cluster: Members, one: str, other: str) -> bool:
    """Whether a process has a connection to where a worker listens."""
    pid, port = cluster.parts[one].popen.pid, int(cluster.entries[other].rpartition(":")[2])
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(
        row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == port and f"socket:[{row[9]}]" in sockets
        for row in rows
    )


class Load:
    """Users who ask the same prompts again and again."""

    def __init__(self, cluster: Members, api: Api, prompts: list[list[int]]) -> None:
        self.cluster, self._api, self._prompts = cluster, api, prompts
        self.old = [self.ask(prompt) for prompt in prompts]
        """Right answers of the first revision."""
        self.others: list[set[tuple[int, ...]]] = [set() for _ in prompts]
        """Prompt |-> all other answers."""
        self.counts = {"old": 0, "new": 0}
        self.is_over = Event()
        self.users: list[Future[None]] = []

    def ask(self, prompt: list[int], **fields: object) -> tuple[int, ...]:
        return tuple(self._api.complete(prompt, ANSWER_LEN, **fields).tokens)

    def use(self, user: int) -> None:
        """Every second request uses no cache: idle workers that have the prompts would get all others for ever."""
        for turn in count():
            for at in range(user, len(self._prompts)):
                if self.is_over.is_set():
                    return
                tokens = self.ask(self._prompts[at], no_cache=(turn + at) % 2 == 0)
                is_old = tokens == self.old[at]
                self.counts["old" if is_old else "new"] += 1
                if not is_old:
                    self.others[at].add(tokens)

    def go_on(self, revision: str) -> None:
        """Until some more answers of that revision came; at once when a user has met a wrong one."""
        before = self.counts[revision]

        def have_gone_on() -> bool:
            return any(user.done() for user in self.users) or self.counts[revision] >= before + 2 * NUM_USERS

        wait_until(have_gone_on, f"answers of the {revision} revision", self.cluster.parts["router"])


def test_a_revision_takes_over_under_load(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama"
    new_model = next_revision(model, folder / "next")
    with members(folder, model) as cluster, ThreadPoolExecutor(NUM_USERS) as pool:
        api = cluster.route("--workers-file", str(cluster.list), "--shutdown-grace-s", "1")
        router = cluster.parts["router"]
        for name in OLD:
            cluster.start(name)
        cluster.write(*OLD)
        wait_until(api.is_ready, "readiness", router)
        wait_used(api.http, "decode-b", router)
        prompts = [random_prompt(60 + 7 * seed, seed=seed) for seed in range(5)]
        load = Load(cluster, api, prompts)
        load.users = [pool.submit(load.use, user) for user in range(NUM_USERS)]
        try:
            load.go_on("old")
            for name in NEW:
                cluster.start(name, new_model)
            cluster.write(*OLD, "prefill-n")  # half of a pair serves nothing,
            router.wait_for_log("prefill-n is not used: does not fit decode-a: fingerprint: here")
            load.go_on("old")
            assert load.counts["new"] == 0
            cluster.write(*OLD, *NEW)  # both revisions serve,
            load.go_on("new")
            load.go_on("old")
            router.wait_for_log("2 revisions serve, each by itself")
            revisions = {name: worker["revision"] for name, worker in known(api.http).items()}
            assert len({revisions[name] for name in OLD}) == len({revisions[name] for name in NEW}) == 1
            assert len(set(revisions.values())) == 2
            for decode in ("decode-a", "decode-b", "decode-n"):
                for prefill in ("prefill-a", "prefill-n"):
                    is_pair = (decode in NEW) == (prefill in NEW)
                    assert connected(cluster, decode, prefill) == is_pair, (decode, prefill)
            cluster.parts["decode-b"].kill()  # one of the first dies: its streams go on on the other,
            load.go_on("old")
            cluster.write(*NEW)  # and the first ones leave
            for name in ("prefill-a", "decode-a", "decode-b"):
                wait_forgotten(api.http, name, router)
            assert cluster.parts["decode-a"].end() == cluster.parts["prefill-a"].end() == 0
            load.go_on("new")
        finally:
            load.is_over.set()
        for user in load.users:
            user.result()
        assert set(known(api.http)) == set(NEW)
        for prompt, old, others in zip(prompts, load.old, load.others, strict=True):
            answer = api.complete(prompt, ANSWER_LEN)
            assert_true(new_model, prompt, answer)
            assert others <= {tuple(answer.tokens)} and old not in {tuple(answer.tokens)}  # nothing in between
        for name in ("router", *NEW):
            assert cluster.parts[name].end() == 0, cluster.parts[name].tail()
        for name in (*OLD, *NEW):
            assert "fingerprint" not in cluster.parts[name].log()  # nobody was asked to do without a fit
