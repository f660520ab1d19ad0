"""What ranks hold of a checkpoint: together all of it, each no more than its part."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltaserve.compute.layers.dense import DenseWeights
from deltaserve.compute.layers.gqa import AttentionWeights
from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.weights import DecoderWeights, allocate
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.shard_rules import Divided, ExpertPlacement, FirstRank, OneOf, PaddedRows
from deltaserve.model.tensors import tensor_parts
from deltaserve.model.weight_bytes import rank_weight_bytes
from tests.compute.weights.plain_matrix import plain
from tests.fixtures.tiny_models import VARIANTS
from tests.layer_parts import dense_of, moe_of

META = torch.device("meta")


def load(folder: Path, shard: Shard = Shard()) -> DecoderWeights:
    return load_weights(folder, load_spec(folder), torch.float32, torch.device("cpu"), shard)


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed matrices are opaque."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def test_blocks_are_divided_each_alone() -> None:
    rows = torch.arange(24).view(12, 2)  # two blocks of 6
    rule = Divided(3, num_blocks=2)
    for rank in range(3):
        shard = Shard(rank, 3)
        got = torch.empty(rule.shape((12, 2), shard), dtype=torch.int64)
        for source, target in rule.pieces((12, 2), shard):
            got[target] = rows[source]
        assert got.tolist() == [rows[line].tolist() for line in (2 * rank, 2 * rank + 1, 6 + 2 * rank, 7 + 2 * rank)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 271])
def test_rows_are_padded_to_equal_shares(count: int, size: int) -> None:
    """Also where the last ranks have none of their own."""
    rows, shares = torch.arange(1, count + 1)[:, None], []
    for shard in (Shard(rank, size) for rank in range(size)):
        share = torch.zeros(PaddedRows().shape((count, 1), shard), dtype=torch.int64)
        for source, target in PaddedRows().pieces((count, 1), shard):
            share[target] = rows[source]
        shares.append(share)
    assert len({share.shape for share in shares}) == 1
    together = torch.cat(shares)
    assert torch.equal(together[:count], rows)
    assert together[count:].count_nonzero() == 0


def test_what_some_ranks_do_not_hold() -> None:
    for rule, holder in ((FirstRank(), 0), (OneOf(3, 4), 1)):
        for rank in range(2):
            shard = Shard(rank, 2)
            assert bool(rule.pieces((5, 2), shard)) == (rank == holder)
            assert rule.shape((5, 2), shard) == ((5, 2) if rank == holder else (0, 2))


PLACED = [
    *(pytest.param(name, size, None, id=f"{name}-{size}") for name in VARIANTS for size in (1, 2, 4)),
    *(
        pytest.param(name, size, ep_size, id=f"{name}-{size}-ep{ep_size}")
        for name in ("qwen3_moe", "qwen3_moe_fused", "deepseek_v3", "gpt_oss")
        for size, ep_size in ((2, 1), (4, 2), (4, 1))
    ),
]


@pytest.mark.parametrize(("name", "size", "ep_size"), PLACED)
def test_every_element_has_its_place_and_is_counted(
    tiny_models: Path, name: str, size: int, ep_size: int | None
) -> None:
    """The pieces fill what is allocated; ranks hold all of it together, once or on each."""
    spec = load_spec(tiny_models / name).placed(ExpertPlacement(ep_size))
    seen = {part: torch.zeros(value.shape, dtype=torch.int32) for part, value in tensor_parts(spec).items()}
    for rank in range(size):
        shard = Shard(rank, size)
        _, targets = allocate(spec, torch.float32, META, shard)
        num_values = 0
        for part, value in tensor_parts(spec).items():
            for source, target in value.pieces(shard):
                seen[part][source] += 1
                shape = seen[part][source].shape
                filled = targets[part][target].shape
                assert filled[len(filled) - len(shape) :] == shape, part
                num_values += shape.numel() if value.covers == (part,) else 0
        packed = spec.vocab_size // size * spec.hidden_size if spec.tied_embeddings else 0
        assert rank_weight_bytes(spec, DType.FLOAT32, shard) == 4 * (num_values + packed)
        assert rank_weight_bytes(spec, DType.FLOAT32, shard, device="cuda") == 4 * num_values
    for part, times in seen.items():
        assert times.min() == times.max(), part
        assert times.max() in (1, size, size // spec.num_kv_heads), part


@pytest.mark.usefixtures("plain_weights")
def test_ranks_hold_their_slices(tiny_models: Path) -> None:
    whole, ranks = load(tiny_models / "llama"), [load(tiny_models / "llama", Shard(rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat([rank.embedding for rank in ranks]), whole.embedding)
    assert torch.equal(torch.cat([plain(rank.lm_head) for rank in ranks]), plain(whole.lm_head))
    for index, rank in enumerate(ranks):
        ours, theirs = rank.layers[1], whole.layers[1]
        assert isinstance(ours.attention, AttentionWeights)
        assert isinstance(theirs.attention, AttentionWeights)
        qkv, all_qkv = plain(ours.attention.qkv.weight), plain(theirs.attention.qkv.weight)
        (q, k, v), (all_q, all_k, all_v) = qkv.tensor_split((32, 48)), all_qkv.tensor_split((128, 192))
        assert torch.equal(q, all_q[32 * index : 32 * (index + 1)])
        assert torch.equal(k, all_k[16 * index : 16 * (index + 1)])
        assert torch.equal(v, all_v[16 * index : 16 * (index + 1)])
        out, all_out = plain(ours.attention.out.weight), plain(theirs.attention.out.weight)
        assert torch.equal(out, all_out[:, 32 * index : 32 * (index + 1)])
        assert isinstance(ours.mlp, DenseWeights)
        assert isinstance(theirs.mlp, DenseWeights)
        gate_up, all_gate_up = plain(ours.mlp.gate_up.weight), plain(theirs.mlp.gate_up.weight)
        assert torch.equal(gate_up[24:], all_gate_up[96:][24 * index : 24 * (index + 1)])
        assert torch.equal(ours.mlp_norm, theirs.mlp_norm)


@pytest.mark.usefixtures("plain_weights")
def test_the_bias_of_a_sum_over_ranks_is_on_one_of_them(tiny_models: Path) -> None:
    first, second = (load(tiny_models / "llama_bias_mha", Shard(rank, 2)).layers[0] for rank in range(2))
    for layer, is_first in ((first, True), (second, False)):
        assert isinstance(layer.attention, AttentionWeights)
        assert isinstance(layer.mlp, DenseWeights)
        assert (layer.attention.out.bias is not None) == is_first
        assert (layer.mlp.down.bias is not None) == is_first
        assert layer.mlp.gate_up.bias is not None


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "num_key_value_heads is 4, which does not divide over 3 tensor-parallel ranks"),
        (16, "num_attention_heads is 8, which does not divide over 16 tensor-parallel ranks"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(tiny_models: Path, size: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(tiny_models / "llama").local(Shard(0, size))
    assert str(caught.value) == message


def test_the_feed_forward_size_counts_where_a_layer_has_it(tiny_models: Path) -> None:
    def odd(name: str) -> ModelSpec:
        """The model with a size that no two ranks share evenly, in dense layers, or else in experts."""
        spec = load_spec(tiny_models / name)
        changed = (
            layer._replace(mlp=replace(layer.mlp, inner=97)) if isinstance(layer.mlp, DenseSpec) else layer
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(changed))

    dense = odd("llama")
    with pytest.raises(ConfigError, match="intermediate_size is 97, which does not divide over 2"):
        dense.local(Shard(0, 2))
    assert odd("qwen3_moe").local(Shard(0, 2)).num_heads == 4
    mixed = odd("qwen3_moe_mixed")
    with pytest.raises(ConfigError, match="intermediate_size is 97"):
        mixed.local(Shard(0, 2))
    experts = replace(moe_of(odd("qwen3_moe")), num_experts=7, intermediate_size=33)
    with pytest.raises(ConfigError, match="num_experts does not divide, and moe_intermediate_size is 33"):
        experts.local(Shard(0, 2))


def test_a_rank_computes_its_share(tiny_models: Path) -> None:
    spec = load_spec(tiny_models / "llama")
    assert spec.local(Shard(0, 1)) is spec
    local = spec.local(Shard(3, 4))
    assert (local.num_heads, local.num_kv_heads, local.vocab_size, dense_of(local).inner) == (2, 1, 272, 24)
    assert spec.local(Shard(7, 8)).num_kv_heads == 1


def test_groups_of_ranks_hold_experts_whole_and_their_ranks_parts() -> None:
    def cuts(placement: ExpertPlacement, num_experts: int, size: int) -> list[tuple[range, int]]:
        """The experts of each rank, and how many ranks share one."""
        shards = [Shard(rank, size) for rank in range(size)]
        return [(placement.held(num_experts, s), placement.cut(num_experts, s).inner.size) for s in shards]

    assert cuts(ExpertPlacement(), 8, 2) == [(range(4), 1), (range(4, 8), 1)]
    assert cuts(ExpertPlacement(), 7, 2) == [(range(7), 2)] * 2
    assert cuts(ExpertPlacement(2), 8, 4) == [(range(4), 2), (range(4), 2), (range(4, 8), 2), (range(4, 8), 2)]
    assert cuts(ExpertPlacement(1), 8, 2) == [(range(8), 2)] * 2
    assert cuts(ExpertPlacement(4), 8, 1) == [(range(8), 1)]


@pytest.mark.parametrize(
    ("ep_size", "size", "message"),
    [(3, 4, "--ep-size 3: must divide the 4 ranks"), (4, 4, "--ep-size 4: 6 experts do not divide")],
)
def test_groups_that_do_not_divide_are_refused(tiny_models: Path, ep_size: int, size: int, message: str) -> None:
    spec = load_spec(tiny_models / "qwen3_moe").placed(ExpertPlacement(ep_size))
    with pytest.raises(ConfigError, match=message):
        replace(moe_of(spec), num_experts=6).local(Shard(0, size))
    with pytest.raises(ConfigError, match="this model has no experts"):
        load_spec(tiny_models / "llama").placed(ExpertPlacement(ep_size))
