"""Decode workers that share experts, behind a prefill worker of other ranks: what they answer, and who keeps what."""

import itertools
from pathlib import Path

import pytest

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.ids import Role
from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.fixtures.tiny_models import VARIANTS
from tests.fixtures.tiny_quantised import quantise_fp8_blocks, write_fp8_blocks
from tests.product.in_process import PREFILL, Pages, Product, Setup, member_name
from tests.recall_models import STATE_MODEL, known_conversations
from tools.recall.experts import with_experts

PATHS = {"direct": None, "staged": StagingMode.ON}


def check_conversations(product: Product, members: int, num_turns: int = 3, page: int = 16) -> None:
    """Check conversations of one client more than members, all at once; every answer is that of transformers."""
    texts = [random_tokens(40 + 9 * client, client) for client in range(members + 1)]
    for turn in range(num_turns):
        known = [len(text) for text in texts]
        texts = [[*text, *random_tokens(21, 10 * client + turn)] for client, text in enumerate(texts)]
        answers = product.serve(*texts)
        if turn:
            hits = [answer.decode_cached_len for answer in answers]
            assert hits == [(count - 1) // page * page for count in known]
        texts = [[*text, *answer.tokens] for text, answer in zip(texts, answers, strict=True)]


@pytest.mark.parametrize(
    ("family", "ranks", "members", "path"),
    [
        ("qwen3_moe", 2, 2, "direct"),
        pytest.param("qwen3_moe", 2, 2, "staged", marks=pytest.mark.wide),
        pytest.param("qwen3_moe", 2, 4, "staged", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 4, "direct", marks=pytest.mark.slow),
        ("deepseek_v3", 1, 2, "direct"),
        ("qwen3_next", 2, 2, "staged"),
        pytest.param("minimax_m2", 4, 2, "staged", marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, 2, "staged", marks=pytest.mark.slow),
        pytest.param("qwen3_next", 1, 4, "direct", marks=pytest.mark.slow),
    ],
)
def test_conversations(tiny_models: Path, family: str, ranks: int, members: int, path: str) -> None:
    setup = Setup(members=members, num_contexts=6)
    product = Product(tiny_models / family, ranks, 1, staging=PATHS[path], setup=setup)
    check_conversations(product, members)
    served = [product.worker(member_name(index)).instance.metrics() for index in range(members)]
    assert all(metrics["deltaserve_steps_total"] > 0 for metrics in served)
    assert product.joint_rounds > 0
    assert product.group.num_joined > 0
    assert (product.worker(PREFILL).count("staged_writes") > 0) is (path == "staged")
    product.close()


@pytest.mark.parametrize("path", [pytest.param("direct", marks=pytest.mark.wide), "staged"])
def test_a_hybrid_with_weights_of_8_bits(tmp_path: Path, path: str) -> None:
    """Prefill on two ranks, pages of 64 tokens; transformers computes with what the weights are worth."""
    folder, plain = write_fp8_blocks(VARIANTS["qwen3_5_moe"], tmp_path, (128, 128))
    setup = Setup(members=2, reference=plain, num_contexts=6)
    product = Product(folder, 2, 1, Pages(64), PATHS[path], setup=setup)
    prompt = random_tokens(137, 1)
    (cold,) = product.serve(prompt)
    whole, fork = product.serve(prompt, [*prompt[:70], *random_tokens(21, 2)])
    assert whole.tokens == cold.tokens
    assert (whole.decode_cached_len, fork.decode_cached_len) == (128, 64)
    check_conversations(product, 2, page=64)
    assert (product.worker(PREFILL).count("staged_writes") > 0) is (path == "staged")
    product.close()


RECALL = RecallTraffic(
    num_documents=3, conversations_per_document=2, num_turns=4, answer_len=8, shape=DocumentShape(22, num_noise=11)
)


@pytest.mark.parametrize(
    ("name", "path"),
    cells(
        itertools.product(("recall-micro", "recall-state-fp8"), PATHS),
        lambda name, path: (name, path) == ("recall-micro", "direct"),
    ),
)
def test_every_answer_is_right(tmp_path: Path, name: str, path: str) -> None:
    """Each token of an answer is looked up in KV, or in the state, of whichever member has it."""
    dense = STATE_MODEL.parent / name.removesuffix("-fp8")
    folder = plain = with_experts(dense, tmp_path / "experts")
    if name.endswith("fp8"):
        folder, plain = quantise_fp8_blocks(folder, with_experts(dense, tmp_path / "plain"), (128, 128))
    conversations = known_conversations(plain, RECALL, seed=3)
    assert len(conversations) >= 5
    setup = Setup(chunk_len=64, max_running=8, num_contexts=12, members=2, reference=plain)
    product = Product(folder, 2, 1, Pages(16), PATHS[path], setup=setup)
    contexts: list[list[int]] = [[] for _ in conversations]
    hits = []
    for turns in zip(*(conversation.turns for conversation in conversations), strict=True):
        prompts = [[*context, *turn.tokens] for context, turn in zip(contexts, turns, strict=True)]
        answers = product.serve(*prompts, max_tokens=RECALL.answer_len)
        assert [answer.tokens for answer in answers] == [turn.expected for turn in turns]
        known = [len(context) for context in contexts]
        hits += [a.decode_cached_len / count for a, count in zip(answers, known, strict=True) if count]
        contexts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    assert min(hits) > 0.75
    assert product.joint_rounds > 0
    assert (product.worker(PREFILL).count("staged_writes") > 0) is (path == "staged")
    product.close()


@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "qwen3_5_moe_mtp"])
def test_members_with_draft_heads(tiny_models: Path, family: str) -> None:
    """Each guesses by itself, with a head whose experts it has whole."""
    setup = Setup(members=2, drafting=(Role.PREFILL, Role.DECODE), num_contexts=6)
    product = Product(tiny_models / family, 2, 1, setup=setup)
    prompts = [random_tokens(33 + 7 * seed, seed) for seed in range(3)]
    answers = product.serve(*prompts, max_tokens=12)
    assert sum(answer.num_rounds for answer in answers) > 0
    assert product.joint_rounds > 0
    product.close()
