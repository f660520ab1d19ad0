"""ModelSpec: everything the decoder needs to know about a model, frozen. No family name is looked at after this."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.model.layers.layer_spec import AttentionSpec, LayerSpec, MixerSpec
from deltaserve.model.shard_rules import ExpertPlacement


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model: sizes, layers and conventions."""

    family: str
    """Name of its Family: `model_type`."""
    dtype: DType
    """Type of the checkpoint's values, as config.json says."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position: int
    """Tokens of context the config promises."""
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    """Multiplies embeddings, rounded to the dtype of the computation."""
    zero_centred_norms: bool = False
    """Files hold the weights of norms less 1, but for that of a delta rule's output."""
    post_norms: bool = False
    """What attention and feed-forward give is normalised, too, before it is added."""
    num_draft_layers: int = 0
    """Layers that files may hold after those of the model: `draft` may be the first of them, others are not used."""
    draft: DraftSpec | None = None
    """Present where tokens are to be guessed by a head of the model's."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer that has it: those of a model differ in their windows and embeddings alone."""
        return self._attending[0]

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each page group of the CacheSpec: None, where a layer sees everything, first."""
        lengths = dict.fromkeys(attention.window_len for attention in self._attending)
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
    def recurrent(self) -> tuple[MixerSpec, ...]:
        """Mixers that keep no pages."""
        return tuple(layer.mixer for layer in self.layers if layer.mixer.attention is None)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0: none has."""
        return max(layer.mlp.expert_count for layer in self.layers)

    def place(self, layer: int) -> tuple[int, int]:
        """Where the layer's keys and values are kept: page group, index within it. Of a recurrent layer: index among
        the recurrent ones, in every state group."""
        attention, before = self.layers[layer].mixer.attention, [one.mixer.attention for one in self.layers[:layer]]
        if attention is None:
            return 0, before.count(None)
        alike = [other for other in before if other is not None and other.window_len == attention.window_len]
        return self.windows.index(attention.window_len), len(alike)

    def local(self, shard: Shard) -> "ModelSpec":
        """What one rank computes: its heads and its part of the feed-forward layers.

        The vocabulary stays the model's: each rank gets the logits of all tokens, though it holds a part of them (where
        the vocabulary does not divide, the last part ends in zeros). Raises ConfigError naming what does not divide.
        """
        if shard.size == 1:
            return self
        self.attention.local(shard)  # what attention lacks is named first
        draft = None if self.draft is None else self.draft.local(shard)
        return replace(self, layers=tuple(layer.local(shard) for layer in self.layers), draft=draft)

    def placed(self, placement: ExpertPlacement) -> "ModelSpec":
        """The spec with its experts placed so, and those of its draft head as far as one worker's ranks hold them: in a
        group each member has them all, since members guess each when it suits them.

        Raises ConfigError where it has none, or they do not divide over the members.
        """
        size = placement.member.size
        if not self.num_experts:
            if placement == ExpertPlacement():
                return self
            flag = f"--dp-size {size}" if size > 1 else f"--ep-size {placement.ep_size}"
            raise ConfigError(f"{flag}: this model has no experts")
        if self.num_experts % size:
            raise ConfigError(f"--dp-size {size}: {self.num_experts} experts do not divide over so many workers")
        layers, draft = tuple(layer._replace(mlp=layer.mlp.placed(placement)) for layer in self.layers), self.draft
        if draft is not None and draft.layer.num_experts:
            draft = replace(draft, layer=draft.layer.placed(replace(placement, member=Shard())))
        return replace(self, layers=layers, draft=draft)

    def cache_spec(self, page_size: int, kv_dtype: DType, state_dtype: DType = DType.FLOAT32) -> CacheSpec:
        """What the model keeps: a page group of the layers that see everything, one per window length, one of the
        draft's layer, and the states of recurrent layers. `state_dtype`: of the states themselves; a convolution's
        inputs are kept as KV is."""
        pages = tuple(self._page_group(window_len, kv_dtype) for window_len in self.windows)
        if self.draft is not None:
            of_draft = self.draft.layer._page_group(None, kv_dtype)
            pages += (replace(of_draft, name=self.draft.group, is_for_guesses=True),)
        if not self.recurrent:
            return CacheSpec(page_size, pages)
        conv_dtype = DType.BFLOAT16 if kv_dtype is DType.FP8_E4M3 else kv_dtype
        states = self.recurrent[0].state_groups(len(self.recurrent), conv_dtype, state_dtype)
        return CacheSpec(page_size, pages + states)

    def _page_group(self, window_len: int | None, kv_dtype: DType) -> PageGroup:
        alike = [attention for attention in self._attending if attention.window_len == window_len]
        return alike[0].page_group(len(alike), kv_dtype)

    @property
    def _attending(self) -> tuple[AttentionSpec, ...]:
        mixers = (layer.mixer.attention for layer in self.layers)
        return tuple(attention for attention in mixers if attention is not None)
