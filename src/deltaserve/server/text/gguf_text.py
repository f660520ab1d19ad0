"""The tokenizer and chat template in a GGUF file's metadata, in the words of a Hugging Face folder."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.formats.gguf_config import CONTROL, TURN_ENDS, UNUSED, token_id
from deltaserve.model.formats.gguf_model import GgufModel
from deltaserve.server.text.library_errors import library_errors
from deltaserve.server.text.pre_tokenizers import DEFAULT, PRE_TOKENIZERS
from deltaserve.server.text.text_files import TemplateSource, TextFiles

_log = logging.getLogger(__name__)
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4
"""Values of tokenizer.ggml.token_type, besides those of gguf_config.py."""
_MAX_TOKEN_LEN = 1024
"""Every cut of a token is looked at: work that grows with the square of its length. Published ones have up to 256."""
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Name in a chat template |-> key below tokenizer.ggml."""
_NEW_TEMPLATE = "write the file anew with another (gguf-new-metadata --chat-template-file), which may be empty"
LOCAL_SAMPLING: Mapping[str, object] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling of files that recommend none: llama.cpp's defaults, for whose files they are. Small quantized models, which
is what most of these are, write rubbish at temperature 1 with nothing cut off."""


def read_text(model: GgufModel) -> TextFiles:
    """Raises ConfigError naming file and key for a vocabulary that cannot be used."""
    generation = model.generation()
    metadata = Fields(dict(model.header.metadata), model.header.file)
    vocabulary = Vocabulary.of(metadata)
    tokenizer = build_tokenizer(metadata, vocabulary)
    names = {name: vocabulary.named(metadata, key) for name, key in _SPECIAL_NAMES.items()}
    template = metadata.text("tokenizer.chat_template", "")
    return TextFiles(
        generation=generation.values or LOCAL_SAMPLING,
        special_names={name: token for name, token in names.items() if token is not None},
        tokenizer=tokenizer,
        template=TemplateSource(template, metadata.where, _NEW_TEMPLATE) if template else None,
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    kinds: list[int]

    @classmethod
    def of(cls, metadata: Fields) -> "Vocabulary":
        tokens = _list_of(metadata, "tokens", str)
        longest = max(map(len, tokens))
        if longest > _MAX_TOKEN_LEN:
            length = f"a token of {longest} characters, at most {_MAX_TOKEN_LEN} are read"
            raise ConfigError(f"{metadata.where}: tokenizer.ggml.tokens has {length}")
        kinds = [_NORMAL] * len(tokens)
        if metadata.has("tokenizer.ggml.token_type"):
            kinds = _list_of(metadata, "token_type", int)
        if len(kinds) != len(tokens):
            raise ConfigError(f"{metadata.where}: {len(tokens)} tokens, but {len(kinds)} values of token_type")
        pairs = zip(tokens, kinds, strict=True)
        return cls(tokens, [CONTROL if token in TURN_ENDS and kind != UNUSED else kind for token, kind in pairs])

    def ids(self, metadata: Fields) -> dict[str, int]:
        """Token |-> id. Rows of the embedding that only fill it up have none."""
        used = {t: i for i, t in enumerate(self.tokens) if t and self.kinds[i] != UNUSED}
        num_used = sum(1 for i, t in enumerate(self.tokens) if t and self.kinds[i] != UNUSED)
        if len(used) < num_used:
            twice = next(t for i, t in enumerate(self.tokens) if self.kinds[i] != UNUSED and used.get(t, i) != i)
            raise ConfigError(f"{metadata.where}: tokenizer.ggml.tokens has {twice[:60]!r} twice")
        return used

    def named(self, metadata: Fields, key: str) -> str | None:
        """The token whose id stands at a key, None where nothing does."""
        found = token_id(metadata, key, len(self.tokens))
        return None if found is None else self.tokens[found]


def build_tokenizer(metadata: Fields, vocabulary: Vocabulary) -> Tokenizer:
    kinds: Mapping[str, Callable[[Fields, Vocabulary], tuple[Tokenizer, bool]]]
    kinds = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in kinds:
        raise metadata.error("tokenizer.ggml.model", "one of " + ", ".join(kinds))
    with library_errors(f"{metadata.where}: not a usable tokenizer"):
        tokenizer, adds_bos = kinds[kind](metadata, vocabulary)
        _add_special_tokens(tokenizer, vocabulary)
        _add_ends(tokenizer, metadata, vocabulary, adds_bos)
        tokenizer.encode("hello")
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    special = [token for token, kind in pairs if token and kind in (CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, kind in pairs if token and kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _add_ends(tokenizer: Tokenizer, metadata: Fields, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """The tokens that the file wants before and after a prompt."""
    before = _end(metadata, vocabulary, "bos", adds_bos)
    after = _end(metadata, vocabulary, "eos", False)
    if not before and not after:
        return
    ends = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
    single = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=ends)


def _end(metadata: Fields, vocabulary: Vocabulary, name: str, default: bool) -> list[str]:
    """The token, if it is to be added. Raises ConfigError for one that a prompt cannot hold."""
    token = vocabulary.named(metadata, f"{name}_token_id")
    if token is None or not metadata.flag(f"tokenizer.ggml.add_{name}_token", default):
        return []
    if token not in vocabulary.ids(metadata):
        key = f"tokenizer.ggml.{name}_token_id"
        raise metadata.error(key, f"a token of text to add to prompts, not the unused {token[:60]!r}")
    return [token]


def _byte_level(metadata: Fields, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """(BPE over bytes, whether a prompt begins with BOS unless the file says)."""
    name = metadata.text("tokenizer.ggml.pre", DEFAULT)
    if name == DEFAULT:
        _log.warning(
            "%s: tokenizer.ggml.pre does not say how the model's tokenizer cuts text; it is cut as by llama.cpp, "
            "and answers may be worse; convert the model again",
            metadata.where,
        )
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise metadata.error("tokenizer.ggml.pre", "one of " + ", ".join(PRE_TOKENIZERS))
    given = _list_of(metadata, "merges", str) if metadata.has("tokenizer.ggml.merges") else []
    merges = [_parts(metadata, merge) for merge in given]
    model = models.BPE(vocab=vocabulary.ids(metadata), merges=merges, ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre.adds_bos


def _parts(metadata: Fields, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ConfigError(f"{metadata.where}: tokenizer.ggml.merges has {merge[:60]!r}, expected two parts")
    return left, right


def _sentence_piece(metadata: Fields, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """(BPE of SentencePiece, True). Its merges are those pairs of tokens that make a token, best score first."""
    ids = vocabulary.ids(metadata)
    scores = _list_of(metadata, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ConfigError(f"{metadata.where}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    merges = []
    for token, index in ids.items():
        if vocabulary.kinds[index] not in (_NORMAL, _USER_DEFINED):
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(-scores[index], -len(left), left, right) for left, right in cuts if left in ids and right in ids]
    merges.sort(key=lambda merge: merge[:2])
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for _, _, left, right in merges],
        unk_token=vocabulary.named(metadata, "unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, True


def _list_of(metadata: Fields, key: str, kind: type) -> list[Any]:
    name = f"tokenizer.ggml.{key}"
    values = metadata.values.get(name)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise metadata.error(name, f"a list of {kind.__name__}")
    return values
