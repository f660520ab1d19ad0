"""A family whose layers are of a kind that is not there yet costs four files.

They are the family, the kind's half without torch, its half with torch, and core/branches.py with two lines more.

Each addition is made in a copy of the tree; what it computes is compared with a reference in plain torch, written here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.test_branches import ROOT, SRC, TABLE, TESTS, copied, python

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 272, 2
CONFIG = {
    "dtype": "float32",
    "eos_token_id": 258,
    "head_dim": DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
}


class Addition(NamedTuple):
    """A kind of layers, and a family that has it."""

    kind: str
    family: str
    files: Mapping[str, str]
    """Path below deltaserve |-> text."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tensors of a layer that the family has beside or in place of those of the other."""

    @property
    def lines(self) -> dict[str, str]:
        """Table of core/branches.py |-> its line there."""
        return {
            "FAMILIES": f'"{self.family}": Branch("deltaserve.model.families.{self.family}"),',
            "LAYERS": f'"{self.kind}": Branch("deltaserve.compute.layers.{self.kind}"),',
        }


GATED_HEADS = Addition(
    "gated_heads",
    "fern",
    {
        "model/families/fern.py": '''"""Fern: each head's output is scaled by a score of the token."""

from deltaserve.model.family import COMMON_RENAMES, Family, decoder_spec, dense_mlp, gqa_spec, num_layers
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gated_heads import GatedHeadsSpec
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.model_spec import ModelSpec


def _build(fields: Fields) -> ModelSpec:
    gqa = gqa_spec(fields, QkNorm.NONE)
    mixer = GatedHeadsSpec(
        rope=gqa.rope, num_heads=gqa.num_heads, num_kv_heads=gqa.num_kv_heads, head_dim=gqa.head_dim
    )
    return decoder_spec(fields, "fern", [LayerSpec(mixer, dense_mlp(fields))] * num_layers(fields))


FAMILIES = (Family("fern", "FernForCausalLM", _build, COMMON_RENAMES),)
''',
        "model/layers/gated_heads.py": '''"""Grouped-query attention whose heads have a gate each."""

from dataclasses import dataclass
from typing import ClassVar

from deltaserve.model.layers.gqa import GqaSpec
from deltaserve.model.shard_rules import Divided
from deltaserve.model.tensor_part import TensorPart, named_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedHeadsSpec(GqaSpec):
    """As GqaSpec."""

    kind: ClassVar[str] = "gated_heads"

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        gate = {"head_gate.weight": ((self.num_heads, hidden), Divided(self.num_heads))}
        return GqaSpec.parts(self, hidden, prefix) | named_parts(gate, f"{prefix}.self_attn")
''',
        "compute/layers/gated_heads.py": '''"""Grouped-query attention whose heads have a gate each."""

from dataclasses import dataclass

from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.layers import gqa
from deltaserve.compute.layers.layer_kind import LayerStep
from deltaserve.compute.layers.paged import PagedMixer, Projected
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.gated_heads import GatedHeadsSpec


@dataclass(frozen=True, slots=True)
class GatedHeads(PagedMixer):
    heads: gqa.AttentionWeights
    gate: Linear  # [Hq, hidden]

    def packed(self, rules: CodeRules) -> "GatedHeads":
        return GatedHeads(self.heads.packed(rules), self.gate.packed(rules))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], step: LayerStep) -> Projected:
        gate = self.gate.product(x, step.ops)[..., None]  # [T, Hq, 1]
        return self.heads.project(x, rope, step)._replace(gate=gate)

    def attend(self, q: Tensor, attention: StepAttention, layer: int) -> Tensor:
        return self.heads.attend(q, attention, layer)

    @property
    def attended_shape(self) -> tuple[int, int]:
        return self.heads.attended_shape

    def output(self, attended: Tensor, gate: Tensor | None, step: LayerStep) -> Tensor:
        return self.heads.output(attended, gate, step)


def allocate(table: TargetTable, spec: GatedHeadsSpec, prefix: str) -> GatedHeads:
    return GatedHeads(gqa.allocate(table, spec, prefix), table.fused(f"{prefix}.self_attn", "head_gate"))
''',
    },
    {"self_attn.head_gate.weight": (HEADS, HIDDEN)},
)

SQUARED = Addition(
    "squared",
    "moss",
    {
        "model/families/moss.py": '''"""Moss: squares of what is positive, behind a gate of the residual stream."""

from deltaserve.model.family import COMMON_RENAMES, MAX_HIDDEN, Family, decoder_spec, gqa_spec, num_layers
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.layers.squared import SquaredSpec
from deltaserve.model.model_spec import ModelSpec


def _build(fields: Fields) -> ModelSpec:
    mlp = SquaredSpec(fields.integer("intermediate_size", 1, MAX_HIDDEN))
    return decoder_spec(fields, "moss", [LayerSpec(gqa_spec(fields, QkNorm.NONE), mlp)] * num_layers(fields))


FAMILIES = (Family("moss", "MossForCausalLM", _build, COMMON_RENAMES),)
''',
        "model/layers/squared.py": '''"""A feed-forward part of squares, behind a gate of the residual stream."""

from dataclasses import dataclass, replace
from typing import ClassVar

from deltaserve.core.layout.shard import Shard
from deltaserve.model.layers.layer_spec import MlpSpec
from deltaserve.model.shard_rules import REPLICATED, Divided
from deltaserve.model.tensor_part import Entry, TensorPart, named_parts, share


@dataclass(frozen=True, slots=True)
class SquaredSpec(MlpSpec):
    """Sizes of it."""

    kind: ClassVar[str] = "squared"

    inner: int

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        entries: dict[str, Entry] = {
            "up_proj.weight": ((self.inner, hidden), Divided(self.inner)),
            "down_proj.weight": ((hidden, self.inner), Divided(self.inner, axis=1)),
            "residual_gate.weight": ((hidden, hidden), REPLICATED),
        }
        return named_parts(entries, f"{prefix}.mlp")

    def local(self, shard: Shard) -> "SquaredSpec":
        return replace(self, inner=share("intermediate_size", self.inner, shard))

    def scratch_floats(self, hidden: int) -> int:
        return 2 * self.inner + hidden
''',
        "compute/layers/squared.py": '''"""A feed-forward part of squares, behind a gate of the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.squared import SquaredSpec


@dataclass(frozen=True, slots=True)
class SquaredWeights:
    up: Linear  # [I, hidden]
    down: Linear  # [hidden, I]
    gate: Linear  # [hidden, hidden]

    def packed(self, rules: CodeRules) -> "SquaredWeights":
        return SquaredWeights(self.up.packed(rules), self.down.packed(rules), self.gate.packed(rules))

    def compute(self, x: Tensor, ops: StepOps, group: ExpertGroup | None = None) -> Tensor:
        inner = self.up.product(x, ops).clamp(min=0).square()
        return self.down.product(inner, ops) * sigmoid(self.gate.product(x, ops))

    def accompany(self, nothing: Tensor, ops: StepOps, group: ExpertGroup) -> None:
        """Nothing: no member's alone."""


def allocate(table: TargetTable, spec: SquaredSpec, prefix: str) -> SquaredWeights:
    return SquaredWeights(*(table.fused(f"{prefix}.mlp", name) for name in ("up_proj", "down_proj", "residual_gate")))
''',
    },
    {"mlp.residual_gate.weight": (HIDDEN, HIDDEN)},
)


def write_folder(addition: Addition, folder: Path) -> Path:
    """A tiny model of the family."""
    folder.mkdir()
    architecture = f"{addition.family.title()}ForCausalLM"
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture]}))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        **({"mlp.gate_proj.weight": (INNER, HIDDEN)} if addition is GATED_HEADS else {}),
        **addition.shapes,
    }
    shapes = {f"model.layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = VOCAB, HIDDEN
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return noise * 0.2 + 1 if len(shape) == 1 else noise * 1.5 / HIDDEN**0.5

    save_file({name: draw(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def grown(addition: Addition, to: Path) -> Path:
    """A copy of the tree with it."""
    copied(to, *TESTS)
    for path, text in addition.files.items():
        (to / "src" / "deltaserve" / path).write_text(text)
    table = (to / TABLE).read_text()
    for name, line in addition.lines.items():
        start = f"{name}: Mapping[str, Branch] = MappingProxyType(\n    {{\n"
        assert start in table
        table = table.replace(start, f"{start}        {line}\n")
    (to / TABLE).write_text(table)
    return to


CHECKED_WITHOUT_TORCH = """
import pathlib, sys
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.known_families import family_named
from deltaserve.model.open_source import open_source
from deltaserve.model.tensors import Inventory, check_weights

path = pathlib.Path(sys.argv[1])
spec, source = load_spec(path), open_source(path)
check_weights(source.headers(), Inventory.of(family_named(spec.family), spec, source.index))
print("torch" in sys.modules)
"""

GENERATES = """
import pathlib, sys

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file

from tests.compute.executor import world

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2
path = pathlib.Path(sys.argv[1])
tensors = load_file(path / "model.safetensors")


def turned(x):  # [T, H, D]
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)  # [T, D / 2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.inference_mode()
def reference_logprobs(path, tokens):
    x = tensors["model.embed_tokens.weight"][torch.tensor(tokens)]  # [T, hidden]
    for layer in range(LAYERS):
        own = {name.split(".", 3)[3][: -len(".weight")]: value for name, value in tensors.items()
               if name.startswith(f"model.layers.{layer}.")}
        normed = functional.rms_norm(x, x.shape[1:], own["input_layernorm"], 1e-6)
        q = turned((normed @ own["self_attn.q_proj"].T).view(-1, HEADS, DIM))
        k = turned((normed @ own["self_attn.k_proj"].T).view(-1, KV_HEADS, DIM))
        v = (normed @ own["self_attn.v_proj"].T).view(-1, KV_HEADS, DIM)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / DIM**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        heads = torch.einsum("hts,shd->thd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        if "self_attn.head_gate" in own:
            heads = heads * (normed @ own["self_attn.head_gate"].T).sigmoid()[..., None]
        x = x + heads.flatten(1) @ own["self_attn.o_proj"].T
        normed = functional.rms_norm(x, x.shape[1:], own["post_attention_layernorm"], 1e-6)
        up = normed @ own["mlp.up_proj"].T
        if "mlp.residual_gate" in own:
            out = (up.relu() ** 2 @ own["mlp.down_proj"].T) * (normed @ own["mlp.residual_gate"].T).sigmoid()
        else:
            out = functional.silu(normed @ own["mlp.gate_proj"].T) * up @ own["mlp.down_proj"].T
        x = x + out
    x = functional.rms_norm(x, x.shape[1:], tensors["model.norm.weight"], 1e-6)
    return (x @ tensors["lm_head.weight"].T).log_softmax(-1)


world.reference_logprobs = reference_logprobs
world.check_generation(world.Driver(path), path)
world.check_generation(world.RankDriver(path, tp_size=2), path)
print("as the reference")
"""
"""Prompts in odd chunks, then tokens drawn from pages, on one rank and on two: every position's whole distribution."""


@pytest.mark.parametrize("addition", [GATED_HEADS, SQUARED], ids=lambda addition: addition.kind)
def test_a_family_with_a_new_kind_of_layer_costs_four_files(addition: Addition, tmp_path: Path) -> None:
    tree, folder = grown(addition, tmp_path / "tree"), write_folder(addition, tmp_path / addition.family)
    before = {path.relative_to(ROOT): path.read_text() for path in SRC.rglob("*.py")}
    after = {path.relative_to(tree): path.read_text() for path in (tree / "src").rglob("*.py")}
    assert before.keys() <= after.keys()
    touched = {path for path, text in after.items() if before.get(path) != text}
    assert touched == {TABLE, *(Path("src", "deltaserve", path) for path in addition.files)}
    assert len(touched) == 4
    checked = python(tree, "-c", CHECKED_WITHOUT_TORCH, str(folder))
    assert checked.stdout == "False\n", checked.stderr
    generated = python(tree, "-c", GENERATES, str(folder))
    assert generated.stdout == "as the reference\n", generated.stderr
