"""Workers that share experts (`serve --dp-size 2 --enable-dp-attention`), and the death of one of them."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltaserve.process.children.exits import Exit
from tests.compute.executor.world import reference_logprobs
from tests.e2e.questions import RECALL_MODEL, ask_about
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Answer, Server, serving
from tests.e2e.test_deaths import busy, stream_tokens
from tools.recall.experts import with_experts

PAGE = 16
GROUP = ("--dp-size", "2", "--enable-dp-attention", "--page-size", str(PAGE), "--num-pages", "256")
MEMBERS = ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> Path:
    return tiny_models / "qwen3_moe"


@pytest.fixture(scope="module")
def group(model: Path) -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-") as folder, serving(Path(folder), model, *GROUP, deaths=None) as server:
        yield server


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    """By transformers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logprobs(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_conversations_stay_on_their_member(group: Server, model: Path) -> None:
    """All at once, four turns of each: what came before is found, on the member that has it, and answers are right."""

    new_len = 20

    def talk(seed: int) -> list[tuple[list[int], Answer]]:
        """Prompt and answer of each turn."""
        text, said = random_prompt(40, seed), []
        for turn in range(4):
            text = [*text, *random_prompt(new_len, 100 * seed + turn)]
            answer = group.complete(text, 6)
            said.append((text, answer))
            text = [*text, *answer.tokens]
        return said

    with ThreadPoolExecutor(6) as pool:
        talks = list(pool.map(talk, range(6)))
    for prompt, answer in chain.from_iterable(talks):  # behind the traffic: it needs the processors
        assert_true(model, prompt, answer)
    later = chain.from_iterable(said[1:] for said in talks)
    hits = [(int(answer.timings["decode_cached_tokens"]), len(prompt) - new_len) for prompt, answer in later]
    num_kept = sum(found >= (known - 1) // PAGE * PAGE for found, known in hits)
    # A worker that a busy machine keeps from speaking gets no new rooms meanwhile: a turn of each conversation that
    # stood there is answered elsewhere. Placed at random, half of the turns would be found.
    assert num_kept >= len(hits) * 5 / 6, hits
    group.wait_quiet()  # one that a busy machine kept from speaking has reported again
    steps = [group.metrics()[name]["deltaserve_steps_total"] for name in MEMBERS]
    assert min(steps) > 0, "both members serve"


def test_a_member_that_is_killed(group: Server, model: Path) -> None:
    """The other one ends of it, both come back, and the client sees at most a pause."""
    prompts = [random_prompt(33, seed) for seed in (51, 52)]

    kills = iter([True])  # one, of two threads that ask

    def on_token(count: int) -> None:
        if count >= 10 and next(kills, False):
            victim = next(iter(busy(group, "decode")), MEMBERS[0])  # any, where both answers were complete already
            group.signal(victim, signal.SIGKILL)

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream_tokens, group, prompt, 40, on_token) for prompt in prompts]
        answers = [stream.result() for stream in streams]
    assert answers == [greedy(model, prompt, 40) for prompt in prompts]
    for name in MEMBERS:
        group.wait_back(name)
    assert len(group.deaths()) == 2
    ends = sorted(death.partition(": ")[2] for death in group.deaths())
    assert ends[0] == f"ended with exit code {Exit.RANK_ENDED.value}"
    assert ends[1].startswith("ended with signal SIGKILL")
    assert_true(model, prompts[0], group.complete(prompts[0], 6))


def test_from_two_ranks_of_prefill_with_guesses(folder: Path) -> None:
    """Staged, n-gram guesses on each member: every token of an answer is looked up in the document's KV."""
    model = with_experts(RECALL_MODEL, folder / "experts")
    flags = ["--prefill-tp-size", "2", "--decode-tp-size", "1", "--staging", "on", "--speculative-algorithm", "NGRAM"]
    with serving(folder / "server", model, *GROUP, *flags) as server:
        asked = ask_about(4, 2, 24, seed=5)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda one: server.complete(one.prompt, 24).tokens, asked))
        assert answers == [one.answer for one in asked]
        server.wait_quiet()
        metrics = server.metrics()
    assert metrics["prefill-0"]["deltaserve_staged_writes_total"] > 0
    assert sum(metrics[name]["deltaserve_drafts_verified_total"] for name in MEMBERS) > 0


def test_groups_on_both_sides(model: Path, tmp_path: Path) -> None:
    """Prompts are computed by a group, too; one of its members is killed while prompts are computed."""
    prompts = [random_prompt(200, seed) for seed in range(60, 68)]
    flags = (*GROUP, "--prefill-dp-size", "2", "--chunked-prefill-size", str(PAGE))
    with serving(tmp_path, model, *flags, deaths=None) as server, ThreadPoolExecutor(len(prompts)) as pool:
        for prompt, answer in zip(prompts, pool.map(lambda one: server.complete(one, 4), prompts), strict=True):
            assert_true(model, prompt, answer)
        steps = [server.metrics()[name]["deltaserve_steps_total"] for name in ("prefill-0", "prefill-1")]
        assert min(steps) > 0, "both members compute"
        server.signal("prefill-1", signal.SIGKILL)
        answers = list(pool.map(lambda one: server.complete(one, 4), [[*one, 7] for one in prompts]))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(model, [*prompt, 7], answer)
        for name in ("prefill-0", "prefill-1"):
            server.wait_back(name)
        server.wait_quiet()
