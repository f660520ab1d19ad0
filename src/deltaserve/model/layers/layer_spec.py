"""What a layer is made of: a mixer (attention, a recurrence) and a feed-forward part, each of a kind.

A kind is two files of one name, which a line of core/branches.py joins: here, without torch, its sizes, names of
tensors, shards and memory; in compute/layers its weights and mathematics.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NamedTuple, Self

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import PageGroup, StateGroup
from deltaserve.core.lifetime import Lifetime, Retention
from deltaserve.model.shard_rules import ExpertPlacement
from deltaserve.model.tensor_part import TensorPart, cannot_divide, share


class RopeKind(Enum):
    """How the frequencies are scaled. Value = `rope_type` in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"
    """Each frequency divided by a number of its own: how GGUF files spell LLAMA3. Not a type of Hugging Face's."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first channels of a head."""

    kind: RopeKind
    theta: float
    dim: int
    """Channels that are rotated."""
    factor: float = 1.0
    original_max_position: int = 0
    """Tokens the model was first trained on (LLAMA3 and YARN)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (YARN)."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one per pair of channels (FACTORS)."""


class Activation(Enum):
    """Function on the gate of a feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""


class StepLens(NamedTuple):
    """The most that a step holds."""

    tokens: int
    rows: int


class PartSpec(ABC):
    """One of the two parts of a layer."""

    __slots__ = ()
    kind: ClassVar[str]
    """Name of the kind in core/branches.py."""

    @property
    def unrecordable(self) -> str | None:
        """Why its decode steps cannot be recorded: as a rule sizes that depend on what is computed. None: they can."""
        return None

    @abstractmethod
    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        """Tensors of a layer, by canonical name; `prefix`: the layer's."""

    @abstractmethod
    def local(self, shard: Shard) -> Self:
        """A rank's part. Raises ConfigError naming what does not divide."""


class MixerSpec(PartSpec):
    """What a layer mixes the tokens of a request with."""

    __slots__ = ()

    @property
    def attention(self) -> "AttentionSpec | None":
        """The same, where it keeps pages; None: a state, or nothing."""
        return None

    def state_groups(self, num_layers: int, conv_dtype: DType, state_dtype: DType) -> tuple[StateGroup, ...]:
        """What so many layers keep of a request, whatever its length."""
        return ()

    def scratch_floats(self, step: StepLens) -> int:
        """Numbers that a layer needs in passing, beside its projections."""
        return 0


class MlpSpec(PartSpec):
    """What a layer does with each token alone."""

    __slots__ = ()

    @property
    def expert_count(self) -> int:
        """Experts among which tokens choose; 0: there are none."""
        return 0

    @abstractmethod
    def scratch_floats(self, hidden: int) -> int:
        """Numbers that a token needs in passing."""

    def placed(self, placement: ExpertPlacement) -> Self:
        """The same with its experts placed so."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """A mixer that keeps something of every token, in pages."""

    rope: RopeSpec
    num_heads: int
    num_kv_heads: int
    """KV heads as the pages hold them: 1 with latents."""
    head_dim: int
    """Channels of a head as the pages hold it: with latents, those kept per token."""
    window_len: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    bias: bool = False
    scale: float | None = None
    """Factor on the scores before the softmax; None: by head_dim."""

    @property
    def attention(self) -> "AttentionSpec":
        return self

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    def local(self, shard: Shard) -> Self:
        if not shard.fits(self.num_kv_heads):
            raise cannot_divide("num_key_value_heads", self.num_kv_heads, shard)
        first, end = shard.heads(self.num_kv_heads)
        num_heads = share("num_attention_heads", self.num_heads, shard)
        return replace(self, num_heads=num_heads, num_kv_heads=end - first)

    def page_group(self, num_layers: int, dtype: DType) -> PageGroup:
        """Pages of so many layers like this one."""
        group = PageGroup("kv", num_layers, self.num_kv_heads, self.head_dim, dtype)
        if self.window_len is None:
            return group
        return replace(group, name=f"window-{self.window_len}", retention=Retention(Lifetime.WINDOW, self.window_len))


class LayerSpec(NamedTuple):
    """One layer."""

    mixer: MixerSpec
    mlp: MlpSpec

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        """Its tensors but its norms, by canonical name."""
        return self.mixer.parts(hidden, prefix) | self.mlp.parts(hidden, prefix)

    def local(self, shard: Shard) -> "LayerSpec":
        return LayerSpec(self.mixer.local(shard), self.mlp.local(shard))
