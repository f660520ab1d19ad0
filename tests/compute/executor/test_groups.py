"""Members of an expert group: each computes its own rows as transformers does, whatever the others have to do."""

from pathlib import Path

import pytest
import torch

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.shard import Shard
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.shard_rules import ExpertPlacement
from tests.compute.executor.groups import GroupDriver
from tests.compute.executor.world import (
    Driver,
    assert_same,
    check_generation,
    distribution,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)
from tests.fixtures.tiny_models import VARIANTS
from tests.fixtures.tiny_quantised import write_fp8_blocks
from tests.layer_parts import moe_of

FAMILIES = ("qwen3_moe", "qwen3_moe_mixed", "minimax_m2", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_while_the_others_are_idle(tiny_models: Path, name: str, size: int) -> None:
    group = GroupDriver(tiny_models / name, size)
    check_generation(group.members[size - 1], tiny_models / name)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_weights_of_8_bits(tmp_path: Path, name: str) -> None:
    quantised, values = write_fp8_blocks(VARIANTS[name], tmp_path, (128, 128))
    check_generation(GroupDriver(quantised, 2).members[0], values)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_steps_of_several_members_in_one_round(tiny_models: Path, name: str) -> None:
    """Their lengths differ; what each computes has the bits that it has alone, with all experts."""
    path = tiny_models / name
    group, alone = GroupDriver(path, 2), Driver(path)
    first, second = group.members
    prompts = random_tokens(61, 1), random_tokens(7, 2)
    for member, prompt in zip(group.members, prompts, strict=True):
        member.open(0, prompt)
    second.is_collecting = True
    second.step([extend(0, prompts[1], 0, 7)])
    (one,) = first.step([extend(0, prompts[0], 0, 61)]).items
    (other,) = second.results[-1].items
    for prompt, item in zip(prompts, (one, other), strict=True):
        want = reference_logprobs(path, prompt)
        got = [distribution(of_token) for of_token in item.prompt_logprobs]
        assert_same(torch.stack([*got, drawn_distribution(item)]), want)
    for row, (prompt, item) in enumerate(zip(prompts, (one, other), strict=True)):
        alone.open(row, prompt)
        (lone,) = alone.step([extend(row, prompt, 0, len(prompt))]).items
        assert lone.drawn == item.drawn


def test_a_step_of_which_nothing_is_read_takes_part_in_all_exchanges(tiny_models: Path) -> None:
    """The chunk of a prompt computes no feed-forward in the last layer; the others wait there all the same."""
    path = tiny_models / "qwen3_moe"
    group = GroupDriver(path, 2)
    first, second = group.members
    prompt = random_tokens(200, 3)
    for member in group.members:
        member.open(0, prompt)
    quiet = [extend(0, prompt, 0, 150, samples=False)]
    second.is_collecting = True
    for items in (quiet, [extend(0, prompt, 150, 200)]):
        second.step(items)
        first.step(items)
    for member in group.members:
        (item,) = member.results[-1].items
        assert_same(drawn_distribution(item), reference_logprobs(path, prompt)[-1])


def test_a_member_holds_its_experts_and_all_else(tiny_models: Path) -> None:
    spec = load_spec(tiny_models / "qwen3_moe")
    for rank in range(2):
        placed = spec.placed(ExpertPlacement(member=Shard(rank, 2)))
        assert placed.local(Shard()) is placed
        assert moe_of(placed).placement.held(8, Shard()) == range(4 * rank, 4 * rank + 4)


def test_what_cannot_be_a_group_is_refused(tiny_models: Path) -> None:
    with pytest.raises(ConfigError, match="--dp-size 3: 8 experts do not divide over so many workers"):
        load_spec(tiny_models / "qwen3_moe").placed(ExpertPlacement(member=Shard(0, 3)))
    with pytest.raises(ConfigError, match="--dp-size 2: this model has no experts"):
        load_spec(tiny_models / "llama").placed(ExpertPlacement(member=Shard(0, 2)))
