"""Which tensors a checkpoint must hold, by name and shape, and whether its files do. No torch: the launcher asks too.

Canonical names are those of the Llama files without the leading `model.`; a family's rename table leads there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from deltaserve.base.errors import ConfigError
from deltaserve.models.family import Family
from deltaserve.models.model_spec import MlaSpec, ModelSpec, MoeSpec, QkNorm, RouterKind
from deltaserve.models.source import TensorHeader

FLOAT_DTYPES = ("F32", "F16", "BF16")
HEAD = "lm_head.weight"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
"""Of a layer."""
FUSED_EXPERTS = ("gate_up_proj", "down_proj")
"""What files call the experts' matrices where each is one tensor of all experts."""
CORRECTION = "gate.e_score_correction_bias"
"""Of a layer's experts."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    covers: tuple[str, ...]
    """Parts it fills: itself, or for a tensor that fuses several (experts), all of those."""


def tensor_parts(spec: ModelSpec) -> dict[str, TensorPart]:
    """Canonical name |-> tensor, for everything a checkpoint of `spec` may hold."""
    table = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": table, "norm.weight": (spec.hidden_size,)}
    if not spec.tied_embeddings:
        shapes[HEAD] = table
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": (spec.hidden_size,) for name in NORMS}
        shapes |= {f"layers.{layer}.self_attn.{name}": shape for name, shape in _attention(spec).items()}
        if not spec.is_moe(layer):
            shapes |= {f"layers.{layer}.mlp.{name}": shape for name, shape in _dense(spec).items()}
    parts = {name: TensorPart(shape, (name,)) for name, shape in shapes.items()}
    if spec.moe is not None:
        for layer in sorted(spec.moe.layers):
            parts |= _experts(spec.hidden_size, spec.moe, f"layers.{layer}.mlp")
    return parts


def _attention(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    if spec.mla is not None:
        return _latent_attention(spec, spec.mla)
    q_size, kv_size, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    sizes = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": shape for name, shape in sizes.items()}
    if spec.attention_bias:
        shapes |= {f"{name}_proj.bias": shape[:1] for name, shape in sizes.items()}
    if spec.qk_norm is QkNorm.HEAD:
        shapes |= {"q_norm.weight": (spec.head_dim,), "k_norm.weight": (spec.head_dim,)}
    if spec.qk_norm is QkNorm.ALL:
        shapes |= {"q_norm.weight": (q_size,), "k_norm.weight": (kv_size,)}
    return shapes


def _latent_attention(spec: ModelSpec, mla: MlaSpec) -> dict[str, tuple[int, ...]]:
    heads, hidden = spec.num_heads, spec.hidden_size
    q_size = heads * (mla.still_dim + spec.rope.dim)
    biased = {"kv_a_proj_with_mqa": (mla.kv_rank + spec.rope.dim, hidden), "o_proj": (hidden, heads * mla.value_dim)}
    plain = {"kv_b_proj": (heads * (mla.still_dim + mla.value_dim), mla.kv_rank)}
    norms = {"kv_a_layernorm": mla.kv_rank}
    if mla.q_rank is None:
        plain["q_proj"] = (q_size, hidden)
    else:
        biased["q_a_proj"], plain["q_b_proj"] = (mla.q_rank, hidden), (q_size, mla.q_rank)
        norms["q_a_layernorm"] = mla.q_rank
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in (biased | plain).items()}
    shapes |= {f"{name}.weight": (size,) for name, size in norms.items()}
    if spec.attention_bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in biased.items()}
    return shapes


def _dense(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return _gated(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _gated(hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": shape for name, shape in sizes.items()}
    if bias:
        shapes |= {f"{name}_proj.bias": shape[:1] for name, shape in sizes.items()}
    return shapes


def _experts(hidden: int, moe: MoeSpec, prefix: str) -> dict[str, TensorPart]:
    """Files hold experts one by one, or fused as `experts.gate_up_proj` and `experts.down_proj`: both are taken."""
    count, inner = moe.num_experts, moe.intermediate_size
    router: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (count, hidden)}
    if moe.router is RouterKind.SIGMOID:
        router[f"{prefix}.{CORRECTION}"] = (count,)
    if moe.shared_size:
        shared = _gated(hidden, moe.shared_size, bias=False)
        router |= {f"{prefix}.shared_experts.{name}": shape for name, shape in shared.items()}
    parts = {name: TensorPart(shape, (name,)) for name, shape in router.items()}
    up_names: list[str] = []
    down_names: list[str] = []
    for expert in range(count):
        names = [f"{prefix}.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        parts |= {name: TensorPart(shape, (name,)) for name, shape in zip(names, shapes, strict=True)}
        up_names += names[:2]
        down_names.append(names[2])
    gate_up, down = (f"{prefix}.experts.{name}" for name in FUSED_EXPERTS)
    parts[gate_up] = TensorPart((count, 2 * inner, hidden), tuple(up_names))
    parts[down] = TensorPart((count, hidden, inner), tuple(down_names))
    return parts


@dataclass(slots=True)
class Inventory:
    """Books which tensors were found. Each is found once; none is missing."""

    family: Family
    parts: Mapping[str, TensorPart]
    index: Mapping[str, str]
    """Tensor |-> file, as the folder's index says; empty without one."""
    num_values: int = 0
    """Elements of all tensors taken."""
    draft_layers: tuple[str, ...] = ()
    """What the names of layers that are not used begin with."""
    unused: list[str] = field(default_factory=list)
    """Tensors of the files that the model does not need."""
    _found: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, family: Family, spec: ModelSpec, index: Mapping[str, str]) -> "Inventory":
        """Nothing found yet. `spec` is `as_stored`."""
        drafts = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
        return cls(family, tensor_parts(spec), index, draft_layers=tuple(f"layers.{layer}." for layer in drafts))

    def take(self, header: TensorHeader) -> str | None:
        """The canonical name of a file's tensor, None for one to skip. Raises ConfigError naming file and tensor."""
        shown = f"{header.file}: {header.name[:80]}"
        told = self.index.get(header.name, "nothing")
        if self.index and told != header.file:
            raise ConfigError(f"{shown} is in this file, but the index says {told[:80]}")
        canonical = self.family.canonical(header.name)
        if canonical is None or canonical.startswith(self.draft_layers):
            self.unused.append(header.name)
            return None
        part = self.parts.get(canonical)
        if part is None:
            raise ConfigError(f"{shown} is not a tensor of this model")
        if header.dtype not in FLOAT_DTYPES:
            raise ConfigError(f"{shown} has dtype {header.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
        if not self._found.isdisjoint(part.covers):
            raise ConfigError(f"{shown} is given twice")
        if header.shape != part.shape:
            raise ConfigError(f"{shown} has shape {list(header.shape)}, expected {list(part.shape)}")
        self._found.update(part.covers)
        self.num_values += prod(header.shape)
        return canonical

    def check_complete(self) -> None:
        """Raises ConfigError unless everything was found."""
        missing = sorted({name for part in self.parts.values() for name in part.covers} - self._found)
        if missing:
            raise ConfigError(f"weights: {len(missing)} tensors are missing, first {missing[0]}")


def as_stored(spec: ModelSpec, family: Family, headers: Iterable[TensorHeader]) -> ModelSpec:
    """`spec`, untied where the files hold an output matrix of their own: it may differ from the embedding.

    transformers uses it then, whatever `tie_word_embeddings` says.
    """
    if not spec.tied_embeddings:
        return spec
    has_head = any(family.canonical(header.name) == HEAD for header in headers)
    return replace(spec, tied_embeddings=not has_head)


def check_weights(headers: Iterable[TensorHeader], inventory: Inventory) -> None:
    """Against what the model needs; no weight is read. Raises ConfigError."""
    for header in headers:
        inventory.take(header)
    inventory.check_complete()
