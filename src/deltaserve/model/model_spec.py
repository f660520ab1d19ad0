"""ModelSpec: everything the decoder needs to know about a model, frozen. No family name is looked at after this."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup, StateGroup
from deltaserve.core.lifetime import Lifetime, Retention
from deltaserve.model.shard_rules import ExpertPlacement


class QkNorm(Enum):
    """RMSNorm on queries and keys before RoPE."""

    NONE = "none"
    HEAD = "head"
    """Each head is normalised alone; one weight [D] for queries and one for keys."""
    ALL = "all"
    """All heads are normalised together; one weight [Hq * D] for queries and one [Hkv * D] for keys."""


class RopeKind(Enum):
    """How the frequencies are scaled. Value = `rope_type` in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"
    """Each frequency divided by a number of its own: how GGUF files spell LLAMA3. Not a type of Hugging Face's."""


class RouterKind(Enum):
    """How expert scores become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    """Each score alone. A learned correction takes part in the choice of experts, not in their weights."""


class Activation(Enum):
    """Function on the gate of a feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""


class Mixer(Enum):
    """What a layer mixes the tokens of a request with."""

    ATTENTION = "attention"
    DELTA_RULE = "delta_rule"
    """A recurrent state in place of keys and values."""


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


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeSpec
    mixer: Mixer = Mixer.ATTENTION
    window_len: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    has_experts: bool = False
    """Whether it has experts in place of the dense feed-forward."""


@dataclass(frozen=True, slots=True)
class ClampedGlu:
    """The product of gate and up projection, which stand side by side row by row: (up + 1) * gate *
    sigmoid(alpha * gate), both clamped."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts in place of the dense feed-forward of some layers."""

    router: RouterKind
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    num_groups: int = 1
    """Experts stand in groups of equal size, one after the other."""
    kept_groups: int = 1
    """Groups whose experts may be chosen: those with the best two."""
    scale: float = 1.0
    """Factor on the experts' sum."""
    shared_size: int = 0
    """Intermediate size of what every token goes through beside its experts; 0: there is none."""
    clamped: ClampedGlu | None = None
    """Product used in place of SwiGLU: then all linear maps, the router's too, have biases, and files hold matrices
    transposed."""
    shared_gate: bool = False
    """What that gives is scaled by the sigmoid of a learned score of the token."""
    placement: ExpertPlacement = ExpertPlacement()

    def local(self, shard: Shard) -> "MoeSpec":
        """A rank's part of its experts."""
        ep_size = self.placement.ep_size
        if ep_size is not None and shard.size > 1:
            if shard.size % ep_size:
                raise ConfigError(f"--ep-size {ep_size}: must divide the {shard.size} ranks of a worker")
            if self.num_experts % ep_size:
                raise ConfigError(f"--ep-size {ep_size}: {self.num_experts} experts do not divide over so many groups")
        inner, shared = self.placement.cut(self.num_experts, shard).inner, self.shared_size
        name = (
            "moe_intermediate_size" if ep_size is not None else "num_experts does not divide, and moe_intermediate_size"
        )
        return replace(
            self,
            intermediate_size=_share(name, self.intermediate_size, inner),
            shared_size=_share("shared experts", shared, shard),
        )


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads are made from one latent per token.

    Only the latent and the rotated part of a key, which all heads share, are kept. Queries are brought into the
    latent's space instead of keys out of it, so attention sees one KV head whose values are its first channels.
    """

    q_rank: int | None
    """Channels that the queries are made from; None: they are made from the hidden state."""
    kv_rank: int
    """Channels of the latent."""
    still_dim: int
    """Channels of a head's query and key that are not rotated."""
    turning_dim: int
    """Channels of a head's query and key that are rotated: RopeSpec.dim."""
    value_dim: int
    """Channels of a head's value."""
    softmax_scale: float
    interleaved: bool
    """Whether channels 2i and 2i + 1 of the checkpoint are rotated together, not i and i + R/2."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Layers whose mixer is a gated delta rule behind a short convolution (compute/layers/delta_rule.py)."""

    num_key_heads: int
    num_value_heads: int
    """Value heads, a multiple of the key heads; those of one key head stand one after the other."""
    key_dim: int
    value_dim: int
    kernel_len: int
    """Tokens that the convolution sees, the token itself included."""
    grouped: bool
    """Whether rows of the input map stand by key head in the checkpoint: query, key, values, gates of each."""

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of the convolution: those of queries, of keys, of values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def local(self, shard: Shard) -> "DeltaSpec":
        if not shard.fits(self.num_key_heads):
            raise _cannot_divide("linear_num_key_heads", self.num_key_heads, shard)
        first, end = shard.heads(self.num_key_heads)
        num_values = _share("linear_num_value_heads", self.num_value_heads, shard)
        return replace(self, num_key_heads=end - first, num_value_heads=num_values)

    def state_groups(self, num_layers: int, conv_dtype: DType, state_dtype: DType) -> tuple[StateGroup, StateGroup]:
        """The last inputs of the convolution, and the state [K, V] of each value head."""
        rows = num_layers * (self.kernel_len - 1)
        keys = HeadBlock(self.num_key_heads, rows, self.key_dim)
        values = HeadBlock(self.num_value_heads, rows, self.value_dim)
        states = HeadBlock(self.num_value_heads, num_layers, self.key_dim * self.value_dim)
        return (
            StateGroup("conv", num_layers, (keys, keys, values), conv_dtype),
            StateGroup("ssm", num_layers, (states,), state_dtype),
        )


class HeadForm(Enum):
    """What a draft head makes its layer's input of, and what it reads of the token before."""

    MERGED = "merged"
    """One linear map of the token's embedding and the hidden state, each normalised. Reads the state after the final
    norm: the model's, then its own."""
    SIDE_BY_SIDE = "side by side"
    """Attention sees embedding and hidden state side by side, each normalised; the state is the residual stream. Reads
    one linear map of what enters three of the model's layers, then its own residual stream."""


class DraftNames(NamedTuple):
    """Canonical names of a draft head's parts; all but that of the layer without `.weight`."""

    layer: str
    merge: str
    """Name of the linear map."""
    hidden_norm: str
    norm: str
    """Name of the norm of what the output matrix reads."""
    embedding_norm: str | None = None
    """Name of the norm of the embedding; None: the layer's own first norm."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A head that guesses further tokens: one layer that sees, at each position, the token there and what the model
    made of the one before it. Entry j of its keys and values depends on the tokens 0 .. j, as the model's own do."""

    algorithm: str
    """One of core/branches.py."""
    form: HeadForm
    layer: "ModelSpec"
    """Its layer, as a model of one layer. `vocab_size`: of the tokens that it embeds."""
    names: DraftNames
    read_layers: tuple[int, ...] = ()
    """Layers of the model whose inputs it reads, ascending."""
    read_size: int = 0
    """Channels of each of those."""
    num_guessable: int | None = None
    """Tokens that it chooses among, by a table; None: all."""
    own_embedding: bool = False
    group: str = "draft"
    """Name of the page group of its layer: equal on all workers that have this head, and on no others of the model."""
    folder: str | None = None
    """Folder of its weights; None: they are among the model's, as are its output matrix and, in any case but
    `own_embedding`, its embedding."""

    def local(self, shard: Shard) -> "DraftSpec":
        return replace(self, layer=self.layer.local(shard))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model: sizes, layers and conventions."""

    family: str
    """Name of its Family: `model_type`."""
    dtype: DType
    """Type of the checkpoint's values, as config.json says."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    """KV heads as the pages hold them: 1 with latents."""
    head_dim: int
    """Channels of a head as the pages hold it: with latents, those kept per token."""
    intermediate_size: int
    norm_eps: float
    qk_norm: QkNorm
    max_position: int
    """Tokens of context the config promises."""
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    output_gate: bool = False
    """What attention gives is scaled by the sigmoid of a gate that each head's query brings."""
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    activation: Activation = Activation.SILU
    attention_scale: float | None = None
    """Factor on the scores before the softmax; None: by head_dim, or what `mla` says."""
    embedding_scale: float = 1.0
    """Multiplies embeddings, rounded to the dtype of the computation."""
    zero_centred_norms: bool = False
    """Files hold the weights of norms less 1, but for that of a delta rule's output."""
    post_norms: bool = False
    """What attention and feed-forward give is normalised, too, before it is added."""
    sinks: bool = False
    """Each head has a learned score of a key that every position sees, and that has no value."""
    delta: DeltaSpec | None = None
    attention_inputs: int = 1
    """Vectors of `hidden_size` side by side that attention is computed from."""
    num_draft_layers: int = 0
    """Layers that files may hold after those of the model: `draft` may be the first of them, others are not used."""
    draft: DraftSpec | None = None
    """Present where tokens are to be guessed by a head of the model's."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def softmax_scale(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        return float(self.head_dim**-0.5) if self.mla is None else self.mla.softmax_scale

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each page group of the CacheSpec: None, where a layer sees everything, first."""
        lengths = dict.fromkeys(layer.window_len for layer in self.layers if layer.mixer is Mixer.ATTENTION)
        return tuple(sorted(lengths, key=lambda length: length or 0))

    @property
    def query_heads(self) -> tuple[int, ...]:
        """Query heads of each page group of the CacheSpec."""
        own = (self.num_heads,) * len(self.windows)
        return own if self.draft is None else (*own, self.draft.layer.num_heads)

    @property
    def draft_group(self) -> int:
        """Index among the page groups of that of the draft's layer."""
        return len(self.windows)

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state."""
        return sum(layer.mixer is Mixer.DELTA_RULE for layer in self.layers)

    def place(self, layer: int) -> tuple[int, int]:
        """Where the layer's keys and values are kept: page group, index within it. Of a recurrent layer: index among
        the recurrent ones, in every state group."""
        if self.layers[layer].mixer is Mixer.DELTA_RULE:
            return 0, sum(before.mixer is Mixer.DELTA_RULE for before in self.layers[:layer])
        window_len = self.layers[layer].window_len
        return self.windows.index(window_len), self._num_attending(window_len, self.layers[:layer])

    def local(self, shard: Shard) -> "ModelSpec":
        """What one rank computes: its heads and its part of the feed-forward layers.

        Experts and vocabulary stay the model's: each rank chooses among all experts, and gets the logits of all tokens,
        though it holds a part of them (where the vocabulary does not divide, the last part ends in zeros). Raises
        ConfigError naming what does not divide.
        """
        if shard.size == 1:
            return self
        if not shard.fits(self.num_kv_heads):
            raise _cannot_divide("num_key_value_heads", self.num_kv_heads, shard)
        first, end = shard.heads(self.num_kv_heads)
        return replace(
            self,
            num_heads=_share("num_attention_heads", self.num_heads, shard),
            num_kv_heads=end - first,
            intermediate_size=self._local_inner(shard),
            moe=None if self.moe is None else self.moe.local(shard),
            delta=None if self.delta is None else self.delta.local(shard),
            draft=None if self.draft is None else self.draft.local(shard),
        )

    def placed(self, placement: ExpertPlacement) -> "ModelSpec":
        """The spec with its experts placed so, and those of its draft head as far as one worker's ranks hold them: in a
        group each member has them all, since members guess each when it suits them.

        Raises ConfigError where it has none, or they do not divide over the members.
        """
        size = placement.member.size
        if self.moe is None:
            if placement == ExpertPlacement():
                return self
            flag = f"--dp-size {size}" if size > 1 else f"--ep-size {placement.ep_size}"
            raise ConfigError(f"{flag}: this model has no experts")
        if self.moe.num_experts % size:
            raise ConfigError(f"--dp-size {size}: {self.moe.num_experts} experts do not divide over so many workers")
        moe, draft = replace(self.moe, placement=placement), self.draft
        if draft is not None and draft.layer.moe is not None:
            draft = replace(draft, layer=draft.layer.placed(replace(placement, member=Shard())))
        return replace(self, moe=moe, draft=draft)

    def _local_inner(self, shard: Shard) -> int:
        if all(layer.has_experts for layer in self.layers):
            return self.intermediate_size  # of no layer
        return _share("intermediate_size", self.intermediate_size, shard)

    def cache_spec(self, page_size: int, kv_dtype: DType, state_dtype: DType = DType.FLOAT32) -> CacheSpec:
        """What the model keeps: a page group of the layers that see everything, one per window length, one of the
        draft's layer, and the states of recurrent layers. `state_dtype`: of the states themselves; a convolution's
        inputs are kept as KV is."""
        pages = tuple(self._page_group(window_len, kv_dtype) for window_len in self.windows)
        if self.draft is not None:
            of_draft = self.draft.layer._page_group(None, kv_dtype)
            pages += (replace(of_draft, name=self.draft.group, is_for_guesses=True),)
        if self.delta is None:
            return CacheSpec(page_size, pages)
        conv_dtype = DType.BFLOAT16 if kv_dtype is DType.FP8_E4M3 else kv_dtype
        return CacheSpec(page_size, pages + self.delta.state_groups(self.num_recurrent, conv_dtype, state_dtype))

    def _page_group(self, window_len: int | None, kv_dtype: DType) -> PageGroup:
        num_layers = self._num_attending(window_len, self.layers)
        group = PageGroup("kv", num_layers, self.num_kv_heads, self.head_dim, kv_dtype)
        if self.mla is not None:
            group = replace(group, name="latent", planes=1, latent_dim=self.mla.kv_rank)
        if window_len is None:
            return group
        return replace(group, name=f"window-{window_len}", retention=Retention(Lifetime.WINDOW, window_len))

    @staticmethod
    def _num_attending(window_len: int | None, layers: Sequence[LayerSpec]) -> int:
        return sum(layer.mixer is Mixer.ATTENTION and layer.window_len == window_len for layer in layers)


def _share(name: str, value: int, shard: Shard) -> int:
    if value % shard.size:
        raise _cannot_divide(name, value, shard)
    return value // shard.size


def _cannot_divide(name: str, value: int, shard: Shard) -> ConfigError:
    return ConfigError(f"{name} is {value}, which does not divide over {shard.size} tensor-parallel ranks")
