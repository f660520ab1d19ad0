"""Ranks of one worker, as threads: every position's distribution and every greedy token as transformers has them."""

import shutil
from itertools import product
from pathlib import Path

import gguf
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.control.sched.plan import (
    ItemOutcome,
    PageUpdate,
    PlanItem,
    RowOpen,
    SharedRun,
    StepPlan,
    TokenOf,
    TokenValues,
    WorkList,
)
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.layout.dtype import DType
from deltaserve.core.quantization import Quantization
from deltaserve.core.tokens import pack_u32
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.shard_rules import ExpertPlacement
from tests.cells import cells
from tests.compute.executor.world import (
    GREEDY,
    TOLERANCE,
    Driver,
    RankDriver,
    assert_same,
    check_generation,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)
from tests.compute.thread_ranks import ThreadCollective
from tests.fixtures.tiny_gguf import write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant, write_variant
from tests.fixtures.tiny_quantised import write_fp8_blocks

FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == torch.float32]
REPLICATED = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "qwen3_moe": {"num_key_value_heads": 1},
    "minimax_m2": {"num_key_value_heads": 2},
}
"""Fewer KV heads than ranks."""


EXPERT_SIZES = ((2, 1), (2, 2), (4, 2))
"""Ranks, and groups of them that have whole experts."""
MAIN = ("llama", "qwen3_moe", "minimax_m2", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next")
"""Families that are cut among 4 ranks as no other is."""


@pytest.mark.parametrize(
    ("name", "tp_size"), cells(product(FLOAT32, (2, 4)), lambda name, tp_size: tp_size == 4 and name not in MAIN)
)
def test_generation(tiny_models: Path, name: str, tp_size: int) -> None:
    check_generation(RankDriver(tiny_models / name, tp_size=tp_size), tiny_models / name)


@pytest.mark.parametrize("name", REPLICATED)
def test_generation_with_replicated_kv_heads(tmp_path: Path, name: str) -> None:
    folder = write_variant(Variant(VARIANTS[name].build, REPLICATED[name]), tmp_path / name)
    driver = RankDriver(folder, tp_size=4)
    assert [rank.memory.kv.page_arenas[0].layout.num_heads for rank in driver.ranks] == [1] * 4
    check_generation(driver, folder)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_fused", "minimax_m2", "deepseek_v3", "gpt_oss"])
def test_generation_with_experts_that_do_not_divide(tmp_path: Path, name: str) -> None:
    """Each rank has a part of every expert."""
    variant = VARIANTS[name]
    field = {"minimax_m2": "num_local_experts", "deepseek_v3": "n_routed_experts"}.get(name, "num_experts")
    changed = Variant(variant.build, {field: 6}, fused_experts=variant.fused_experts)
    folder = write_variant(changed, tmp_path / name)
    check_generation(RankDriver(folder, tp_size=4), folder)


ODD_VOCAB = 271
"""Prime. All ids of the tiny tokenizer are below."""


@pytest.mark.parametrize(
    ("name", "tp_size"),
    cells(product(("qwen3", "qwen3_5", *MAIN), (2, 4)), lambda name, tp_size: tp_size == 2 and name != "llama"),
)
def test_generation_with_a_vocabulary_that_does_not_divide(tmp_path: Path, name: str, tp_size: int) -> None:
    """Every rank's share has as many rows; those that fill up the last one are in no distribution."""
    variant = VARIANTS[name]
    odd = Variant(variant.build, {**variant.changes, "vocab_size": ODD_VOCAB}, centred_norms=variant.centred_norms)
    folder = write_variant(odd, tmp_path / name)
    driver = RankDriver(folder, tp_size)
    assert [len(rank._decoder._weights.embedding) for rank in driver.ranks] == [-(-ODD_VOCAB // tp_size)] * tp_size
    check_generation(driver, folder)


def test_a_token_that_fills_up_a_share_is_no_tokens_embedding(tmp_path: Path) -> None:
    """The last rank has rows for it, of zeros."""
    folder = write_variant(Variant(VARIANTS["llama"].build, {"vocab_size": ODD_VOCAB}), tmp_path / "llama")
    driver = RankDriver(folder, tp_size=2)
    last = driver.ranks[1]._decoder._weights.embedding
    assert last[-1].count_nonzero() == 0
    assert last[-2].count_nonzero() > 0
    driver.open(0, [1, 2, ODD_VOCAB])
    with pytest.raises(StateError, match=r"a token outside of 0\.\.270"):
        driver.step([extend(0, [1, 2, ODD_VOCAB], 0, 3)])


@pytest.mark.parametrize("quantization", ["auto", "int8", "a8"])
def test_codes_of_a_vocabulary_that_does_not_divide(tmp_path: Path, quantization: Quantization) -> None:
    """Logits of one rank and of two have as many lines, and near values: only sums over ranks are added otherwise."""
    odd = Variant(VARIANTS["llama"].build, {"vocab_size": ODD_VOCAB})
    file, _ = write_gguf(odd, tmp_path, gguf.GGMLQuantizationType.Q8_0)
    prompt, found = random_tokens(40, 3), []
    for tp_size in (1, 2):
        driver = _Coded(file, tp_size, quantization)
        driver.open(0, prompt)
        found.append(drawn_distribution(driver.step([extend(0, prompt, 0, 40)]).items[0]))
    assert found[0].shape == (ODD_VOCAB,)
    assert_same(found[1], found[0], 0.3 if quantization == "a8" else TOLERANCE)


class _Coded(RankDriver):
    """With matrices kept as codes."""

    def __init__(self, path: Path, tp_size: int, quantization: Quantization) -> None:
        self.quantization = quantization
        RankDriver.__init__(self, path, tp_size, dtype=DType.FLOAT32)


@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size"),
    cells(
        ((name, *sizes) for name in ("qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss") for sizes in EXPERT_SIZES),
        lambda name, _, ep_size: ep_size == 1 and name != "qwen3_moe",
    ),
)
def test_generation_with_groups_of_ranks_for_experts(tiny_models: Path, name: str, tp_size: int, ep_size: int) -> None:
    driver = RankDriver(tiny_models / name, tp_size, placement=ExpertPlacement(ep_size))
    check_generation(driver, tiny_models / name)


def test_generation_of_8_bit_weights_with_groups_of_ranks_for_experts(tmp_path: Path) -> None:
    quantised, values = write_fp8_blocks(VARIANTS["qwen3_next"], tmp_path, (128, 128))
    check_generation(RankDriver(quantised, 2, placement=ExpertPlacement(2)), values)


def test_generation_with_an_output_matrix_of_its_own_though_tied(tiny_models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models / "qwen3", tmp_path / "qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(272, 64, generator=torch.Generator().manual_seed(0)) / 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_generation(RankDriver(folder, tp_size=2), folder)


def test_generation_of_a_quantised_folder(tmp_path: Path) -> None:
    quantised, values = write_fp8_blocks(VARIANTS["qwen3_moe"], tmp_path, (24, 40))
    check_generation(RankDriver(quantised, tp_size=2), values)


def test_generation_of_a_gguf_file(tmp_path: Path) -> None:
    file, values = write_gguf(VARIANTS["llama"], tmp_path, gguf.GGMLQuantizationType.F16)
    check_generation(RankDriver(file, dtype=DType.FLOAT32, tp_size=2), values)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_sharing_on_and_off_gives_equal_bits(tiny_models: Path, name: str) -> None:
    driver = RankDriver(tiny_models / name, tp_size=2)
    prompt = random_tokens(101, 5)
    driver.open(0, prompt)
    driver.step([extend(0, prompt, 0, 101)])
    for row in range(1, 6):
        driver.open(row, prompt, capacity=112 + row, prefix_of=0, prefix_len=96)
        driver.step([extend(row, prompt, 96, 101)])
    items = [PlanItem(RowId(row), 101, 1, TokenValues(pack_u32([row])), True) for row in range(6)]
    alone = driver.step(items)
    together = driver.step(items, [SharedRun(0, 96, tuple(RowId(row) for row in range(6)))])
    assert [item.drawn for item in together.items] == [item.drawn for item in alone.items]
    assert together.shared_tokens_read == 96 * 5


def test_guesses_that_only_the_first_rank_finds_right(tiny_models: Path) -> None:
    """The next item begins behind them on all ranks, whatever the others knew of the row."""
    driver, path = RankDriver(tiny_models / "llama", tp_size=2), tiny_models / "llama"
    prompt = random_tokens(40, 6)
    driver.open(0, prompt, msgspec.structs.replace(GREEDY, max_tokens=64))
    (result,) = driver.step([extend(0, prompt, 0, 40)]).items
    text = [*prompt, result.drawn[0].token]
    for wrong in (0, 1, 2):
        guesses: list[int] = []
        for _ in range(2):
            guesses.append(int(reference_logprobs(path, [*text, *guesses])[-1].argmax()))
        if wrong < 2:
            guesses[wrong] = (guesses[wrong] + 1) % 256
        inputs = TokenValues(pack_u32([text[-1], *guesses]))
        (result,) = driver.step([PlanItem(RowId(0), len(text) - 1, 3, inputs, True, num_drafts=2)]).items
        assert len(result.drawn) == 1 + wrong
        want = reference_logprobs(path, [*text, *guesses])
        assert [sampled.token for sampled in result.drawn] == want[len(text) - 1 :][: 1 + wrong].argmax(-1).tolist()
        text += [sampled.token for sampled in result.drawn]


def test_logits_that_are_not_finite_leave_the_ranks_in_step(tiny_models: Path) -> None:
    """One rank's memory is damaged; each gathers what the plan says all the same, whatever the first one sees."""
    driver = RankDriver(tiny_models / "llama", tp_size=2)
    prompt = random_tokens(200, 6)
    driver.open(0, prompt)
    driver.step([extend(0, prompt, 0, 16)])
    arena = driver.ranks[1].memory.kv.page_arenas[0]
    page, size = driver.pages[0][0], arena.layout.page_bytes
    arena.bytes[page * size : (page + 1) * size] = 0xFF  # NaN
    (bad,) = driver.step([extend(0, prompt, 16, 200)]).items
    assert (bad.outcome, bad.drawn, bad.prompt_logprobs) == (ItemOutcome.NOT_FINITE, (), ())
    driver.open(1, prompt)
    (good,) = driver.step([extend(1, prompt, 0, 200)], closes=[0]).items
    assert_same(drawn_distribution(good), reference_logprobs(tiny_models / "llama", prompt)[-1])


def test_other_ranks_take_no_token_that_they_should_have_drawn(tiny_models: Path) -> None:
    executor = RankDriver(tiny_models / "llama", tp_size=2).ranks[1]
    opened = RowOpen(RowId(0), GREEDY, pack_u32([1]), 1)
    item = PlanItem(RowId(0), 1, 1, TokenOf(StepIndex(0)), True)
    with pytest.raises(StateError, match="rank 1 draws no tokens, but step 1 asks for one that it drew"):
        executor.execute(StepPlan(StepIndex(1), (item,), WorkList(32), (opened,)))


def test_a_rank_that_fails_fails_its_worker(tiny_models: Path) -> None:
    """Its requests do not end one by one: the ranks are out of step."""
    first, second = RankDriver(tiny_models / "llama", tp_size=2).ranks
    plan = StepPlan(
        StepIndex(0),
        (extend(0, [1, 2, 3], 0, 3),),
        WorkList(32),
        (RowOpen(RowId(0), GREEDY, pack_u32([1, 2, 3]), 3),),
        (PageUpdate(RowId(0), PoolId(0), 0, (PageId(0),)),),
    )
    collective = second._decoder._collective
    assert isinstance(collective, ThreadCollective)
    collective.leave()
    with pytest.raises(CollectiveError):
        first.execute(plan)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_token_beyond_the_vocabulary_is_no_tokens_embedding(tiny_models: Path, num_ranks: int) -> None:
    """However many ranks divide the table. The step fails; with several ranks that ends their worker."""
    path = tiny_models / "llama"
    beyond = [1, 2, load_spec(path).vocab_size]
    driver = Driver(path) if num_ranks == 1 else RankDriver(path, num_ranks)
    driver.open(0, beyond)
    if num_ranks == 1:
        (item,) = driver.step([extend(0, beyond, 0, 3)]).items
        assert item.outcome is ItemOutcome.FAILED
    else:
        with pytest.raises(StateError, match=r"a token outside of 0\.\."):
            driver.step([extend(0, beyond, 0, 3)])
