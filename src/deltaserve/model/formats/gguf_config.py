"""The metadata of a GGUF file -> the fields that config.json of the same model has."""

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.model.family import MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_POSITION, Family, GgufForm
from deltaserve.model.fields import Fields, shown
from deltaserve.model.formats.gguf_header import GgufHeader
from deltaserve.model.known_families import families

TABLE = "token_embd.weight"
TURN_ENDS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
"""Tokens that end an answer in every model that has them: a file names one or two of them by id, and some files call
others of them ordinary. They are control tokens, as for llama.cpp."""
_CONTROL_ENDS = frozenset({"</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|EOT|>"})
"""Control tokens that end an answer, but are ordinary text in other models: `</s>` is an HTML tag in Gemma's
vocabulary."""
_MESSAGE_END, _AFTER_MESSAGES = "<|end|>", frozenset({"<|return|>", "<|call|>"})
"""Where a vocabulary has the others too, the first ends a message of several (gpt-oss), as for llama.cpp."""
_NO_TOKEN = (-1, 2**32 - 1)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""Keys below the architecture's name that are used."""
_IDLE = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
"""Keys that change nothing."""
_ONLY: Mapping[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "attention.sliding_window": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
"""Keys whose other values ask for what is not computed here."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key below general.sampling |-> field of generation_config.json."""


def _refuse_unknown(fields: Fields, also_read: Collection[str]) -> None:
    """Refuse a key that nobody here knows: it may change what the model computes."""
    for name, value in fields.values.items():
        if name in _ONLY and name not in also_read:
            if value != _ONLY[name]:
                raise fields.error(name, f"{_ONLY[name]}: anything else is not supported")
        elif name not in _READ and name not in _IDLE and name not in also_read:
            key = f"{fields.prefix}{name}"
            raise ConfigError(f"{fields.where}: {key[:80]} is {shown(value)}: what it asks for is not supported")


def config_values(header: GgufHeader, rope_factors: tuple[float, ...] | None) -> dict[str, Any]:
    """`rope_factors`: the file's divisors of the rotary frequencies. Raises ConfigError naming file and key."""
    metadata = Fields(dict(header.metadata), header.file)
    family, form = gguf_family(metadata)
    prefix = f"{form.architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.values.items() if key.startswith(prefix)}
    _refuse_unknown(Fields(own, metadata.where, prefix), form.keys)
    fields = Fields(own | _one_for_all_layers(own), metadata.where, prefix)
    hidden = fields.integer("embedding_length", 1, MAX_HIDDEN)
    heads = fields.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = fields.integer("attention.key_length", 2, MAX_HEADS, default=max(2, hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, 0, MAX_HEADS, default=head_dim) != head_dim:
            raise fields.error(name, f"{head_dim}, as many as keys have")
    vocab_size = _vocab_size(header)
    names = {tensor.name for tensor in header.tensors}
    values = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": _dtype(header),
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", 1, heads, default=heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length", 1, 16 * MAX_HIDDEN),
        "max_position_embeddings": fields.integer("context_length", 1, MAX_POSITION),
        "rms_norm_eps": fields.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(fields, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "eos_token_id": end_ids(metadata, vocab_size),
    }
    return {**values, **form.fields(fields, values)}


def _one_for_all_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Some converters list one number per layer: where those are equal, it is that number."""
    lists = {name: value for name, value in values.items() if isinstance(value, list) and value}
    return {name: value[0] for name, value in lists.items() if len({*map(str, value)}) == 1}


def generation_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say: the sampling that the model's author recommends."""
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in given.items() if value is not None}


def token_id(metadata: Fields, key: str, vocab_size: int) -> int | None:
    """The id at a key below tokenizer.ggml. None where nothing does, or -1 as converters write it for no token."""
    name = f"tokenizer.ggml.{key}"
    if not metadata.has(name) or metadata.values[name] in _NO_TOKEN:
        return None
    return metadata.integer(name, 0, vocab_size - 1)


def end_ids(metadata: Fields, vocab_size: int) -> list[int]:
    """Ids that end an answer: those named by key, and tokens known by name."""
    ids = {found for key in _END_KEYS if (found := token_id(metadata, key, vocab_size)) is not None}
    tokens, kinds = metadata.values.get("tokenizer.ggml.tokens"), metadata.values.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list):
        given = kinds if isinstance(kinds, list) else []
        ends = TURN_ENDS - {_MESSAGE_END} if set(tokens) >= _AFTER_MESSAGES else TURN_ENDS
        pairs = enumerate(zip_longest(tokens[:vocab_size], given[:vocab_size]))
        ids |= {
            index
            for index, (token, kind) in pairs
            if (token in ends and kind != UNUSED) or (token in _CONTROL_ENDS and kind == CONTROL)
        }
    return sorted(ids)


CONTROL, UNUSED = 3, 5
"""Values of tokenizer.ggml.token_type for control tokens and unused ones."""


def gguf_family(metadata: Fields) -> tuple[Family, GgufForm]:
    """The family of a file, and how such files hold it. Raises ConfigError for a file of no model that is served."""
    arch = metadata.text("general.architecture")
    known = {family.gguf.architecture: (family, family.gguf) for family in families() if family.gguf is not None}
    if arch not in known:
        raise metadata.error("general.architecture", "one of " + ", ".join(known))
    if metadata.text("general.type", "model") != "model":
        raise metadata.error("general.type", "model")
    if metadata.integer("split.count", 0, 1 << 16, default=1) > 1:
        raise metadata.error("split.count", "1: a model in several files is not read; join them with gguf-split")
    return known[arch]


def _vocab_size(header: GgufHeader) -> int:
    for tensor in header.tensors:
        if tensor.name == TABLE and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise ConfigError(f"{header.file}: tensor {TABLE!r} is missing or no matrix")


def _dtype(header: GgufHeader) -> str:
    """What the matrices lose nothing in: their own type, or float32 for quantised ones and mixtures."""
    kinds = {tensor.quantisation.name for tensor in header.tensors if len(tensor.shape) > 1}
    if kinds == {"F16"}:
        return "float16"
    return "bfloat16" if kinds == {"BF16"} else "float32"


def _rope(fields: Fields, head_dim: int, factors: tuple[float, ...] | None) -> dict[str, Any]:
    """The `rope_parameters` that config.json of the same model has."""
    values: dict[str, Any] = {"rope_theta": fields.positive("rope.freq_base", 10000.0)}
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    if factors is not None:
        if kind != "none" or len(factors) != head_dim // 2:
            raise fields.error("rope.scaling.type", f"none with a tensor of {head_dim // 2} rope factors")
        return values | {"rope_type": "factors", "factors": list(factors)}
    match kind:
        case "none":
            return values | {"rope_type": "default"}
        case "linear":
            return values | {"rope_type": "linear", "factor": _factor(fields)}
        case "yarn":
            names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            names |= {"original_max_position_embeddings": "original_context_length"}
            given = {name: fields.values.get(f"rope.scaling.{key}") for name, key in names.items()}
            values |= {name: value for name, value in given.items() if value is not None}
            return values | {"rope_type": "yarn", "factor": _factor(fields)}
        case _:
            raise fields.error("rope.scaling.type", "one of none, linear, yarn")


def _factor(fields: Fields) -> float:
    return fields.positive("rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear")
