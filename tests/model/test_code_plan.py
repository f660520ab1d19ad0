"""What is kept as codes, how many bytes it takes, and what it does to log-probabilities."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.compute.layers.dense import DenseWeights
from deltaserve.compute.layers.native_ops import usable_quantization
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.weights.block_matrix import BlockMatrix, Stacked, block_values, round_matrix
from deltaserve.compute.weights.loader import load_weights
from deltaserve.compute.weights.packing import pack
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.quantization import Quantization
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.code_plan import CODE_RULES, code_bytes, is_multiplied, plan_codes, stored_kinds
from deltaserve.model.formats.block_forms import INT8, TYPE_FORMS
from deltaserve.model.known_families import family_of
from deltaserve.model.open_source import open_source
from deltaserve.model.tensors import as_stored, tensor_parts
from deltaserve.model.weight_bytes import rank_weight_bytes
from tests.compute.executor.world import Driver, distribution, extend, random_tokens, reference_logprobs
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant
from tests.fixtures.tiny_quantised import COMPRESSED, write_compressed

CPU = torch.device("cpu")
MODES: tuple[Quantization, ...] = ("auto", "none")


def held(weights: object) -> Iterator[Tensor | BlockMatrix]:
    """Every tensor in dataclasses, once."""
    if isinstance(weights, Tensor | BlockMatrix):
        yield weights
    elif isinstance(weights, tuple | list):
        for part in weights:
            yield from held(part)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from held(getattr(weights, field.name))


def matrices(weights: object) -> list[BlockMatrix]:
    return [one for one in held(weights) if isinstance(one, BlockMatrix)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "minimax_m2"])
def test_what_is_rounded_is_counted(tiny_models: Path, name: str) -> None:
    """But that matrices side by side fill up a panel together."""
    if name not in VARIANTS:
        pytest.skip(f"no {name} among the tiny models")
    path = tiny_models / name
    spec, source = load_spec(path), open_source(path)
    stored = as_stored(spec, family_of(source.config()), source.headers())
    weights = load_weights(path, spec, torch.float32, CPU, quantization="int8")
    found = sum(one.panels.numel() for one in matrices(weights))
    rules = CODE_RULES["int8"]
    parts = {name: part for name, part in tensor_parts(stored).items() if part.covers == (name,)}
    counted = [code_bytes(name, part.shape, None, rules) or 0 for name, part in parts.items()]
    tied = INT8.num_bytes(spec.vocab_size, spec.hidden_size) if stored.tied_embeddings else 0
    assert 0 < found <= sum(counted) + tied <= 1.3 * found
    none, int8 = (rank_weight_bytes(stored, DType.FLOAT32, Shard(), {}, CODE_RULES[q]) for q in ("none", "int8"))
    assert int8 < 0.8 * none


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_bytes_of_a_file_are_those_loaded(tmp_path: Path, kind: Kind, tied: bool) -> None:
    wide = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 512, "vocab_size": 288}
    path, _ = write_gguf(Variant(VARIANTS["qwen3" if tied else "llama"].build, wide), tmp_path, kind)
    spec, source = load_spec(path), open_source(path)
    family = family_of(source.config())
    stored, kinds = as_stored(spec, family, source.headers()), stored_kinds(source, family)
    assert stored.tied_embeddings is tied
    for rank in range(2):
        shard = Shard(rank, 2)
        weights = load_weights(path, spec, torch.float32, CPU, shard, "auto")
        found = sum(one.panels.numel() if isinstance(one, BlockMatrix) else 4 * one.numel() for one in held(weights))
        assert isinstance(weights.lm_head, BlockMatrix)
        counted = rank_weight_bytes(stored, DType.FLOAT32, shard, kinds, CODE_RULES["auto"])
        assert counted <= found <= 1.005 * counted  # norms of heads are repeated
        assert {one.form for one in matrices(weights)} == {TYPE_FORMS[kind.name]}


@pytest.mark.parametrize("form", COMPRESSED)
def test_whole_numbers_of_folders_are_kept(tmp_path: Path, form: str) -> None:
    """With the values that they are dequantised to; factors of runs that are no multiple of 32 are not."""
    how = COMPRESSED[form]
    folder, _ = write_compressed(VARIANTS["llama"], tmp_path, how)
    spec = load_spec(folder)
    is_kept = how.kind == "int" and (how.group_size or 32) % 32 == 0
    kinds = stored_kinds(open_source(folder), family_of(open_source(folder).config()))
    assert set(kinds.values()) == ({f"I{how.bits}"} if is_kept else set())
    for shard in (Shard(), Shard(1, 2)):
        kept, values = (load_weights(folder, spec, torch.float32, CPU, shard, mode) for mode in MODES)
        assert bool(matrices(kept)) is is_kept
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        for ours, theirs in zip(kept.layers, values.layers, strict=True):
            assert isinstance(ours.mlp, DenseWeights)
            assert isinstance(theirs.mlp, DenseWeights)
            weights = ours.mlp.gate_up.weight, theirs.mlp.gate_up.weight
            torch.testing.assert_close(*(TorchOps().product(x, weight) for weight in weights), rtol=1e-5, atol=1e-5)


def test_a_plan_names_what_ranks_cut_within_runs(tmp_path: Path) -> None:
    path, _ = write_gguf(VARIANTS["llama"], tmp_path, Kind.Q4_1)
    source = open_source(path)
    kinds = stored_kinds(source, family_of(source.config()))
    parts = tensor_parts(load_spec(path))
    whole, cut = plan_codes(parts, kinds, Shard()), plan_codes(parts, kinds, Shard(1, 4))
    assert whole.uncut == ()
    assert "embed_tokens.weight" not in whole.forms
    assert set(whole.forms) - set(cut.forms) == set(cut.uncut)
    assert {name.rpartition(".mlp.")[2] for name in cut.uncut} == {"down_proj.weight"}


def test_which_names_are_multiplied_with() -> None:
    yes = "layers.0.self_attn.q_proj layers.0.self_attn.kv_a_proj_with_mqa layers.3.linear_attn.in_proj_qkvz lm_head"
    yes += (
        " layers.1.mlp.experts.7.up_proj layers.1.mlp.shared_experts.down_proj mtp.fc fc layers.0.linear_attn.out_proj"
    )
    no = "layers.0.self_attn.kv_b_proj layers.0.mlp.gate embed_tokens norm layers.0.mlp.shared_expert_gate"
    assert all(is_multiplied(f"{name}.weight") for name in yes.split())
    assert not any(is_multiplied(f"{name}.weight") for name in no.split())
    assert not is_multiplied("layers.0.self_attn.q_proj.bias")


def test_what_is_not_rounded() -> None:
    """Rows of another length, and matrices that no scale in float16 fits; plain parts of others are."""
    rules = CODE_RULES["int8"]
    assert isinstance(pack(torch.ones(8, 72), rules), Tensor)
    assert isinstance(pack(torch.full((8, 64), float("inf")), rules), Tensor)
    assert isinstance(pack(torch.ones(8, 64)), Tensor)
    stacked = pack(Stacked((torch.ones(8, 64), round_matrix(torch.ones(8, 64)))), rules)
    assert isinstance(stacked, Stacked)
    assert all(isinstance(part, BlockMatrix) for part in stacked.parts)


def test_without_the_native_library_there_are_no_codes() -> None:
    assert usable_quantization("auto", TorchOps()) == "none"
    assert usable_quantization("none", TorchOps()) == "none"
    with pytest.raises(ConfigError, match="--quantization a8: computed by the native library"):
        usable_quantization("a8", TorchOps())


def logprobs(driver: Driver, tokens: list[int]) -> Tensor:
    """Log-probabilities of all tokens but the first, each with the whole vocabulary."""
    driver.open(0, tokens)
    (item,) = driver.step([extend(0, tokens, 0, len(tokens))]).items
    return torch.stack([distribution(one) for one in item.prompt_logprobs])


class Int8(Driver):
    quantization = "int8"


class A8(Driver):
    quantization = "a8"


@pytest.mark.parametrize(("kind", "most"), [(Int8, 0.1), (A8, 0.15)])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_rounding_changes_little(tiny_models: Path, name: str, kind: type[Driver], most: float) -> None:
    tokens = random_tokens(100, 7)
    want = reference_logprobs(tiny_models / name, tokens)[:-1]
    difference = (logprobs(kind(tiny_models / name), tokens) - want).abs().mean()
    assert 1e-4 < difference < most


def test_a_files_codes_are_not_rounded_again(tmp_path: Path) -> None:
    path, _ = write_gguf(VARIANTS["llama"], tmp_path, Kind.Q4_1)
    spec = load_spec(path)
    modes: tuple[Quantization, ...] = ("auto", "int8", "a8")
    exact, *rounded = (matrices(load_weights(path, spec, torch.float32, CPU, quantization=mode)) for mode in modes)
    for others in rounded:
        assert all(torch.equal(a.panels, b.panels) for a, b in zip(exact, others, strict=True))
    assert [one.rounds_inputs for one in exact] == [False] * len(exact)
    assert [one.rounds_inputs for one in rounded[1]] == [True] * len(exact)
    assert block_values(exact[0]).isfinite().all()
