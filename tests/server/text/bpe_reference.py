"""Tokenizers written down plainly, to compare with: byte-level BPE after the cuts of llama.cpp, and SentencePiece's."""

from itertools import pairwise

import regex

from tests.fixtures.tiny_tokenizer import byte_alphabet

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LETTERS_OF_DEEPSEEK = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"
_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DIGITS = (r"\p{N}", _GPT2)
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2",), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "mpt": (_GPT2,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9]{3}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-llm": ("[\r\n]", _LETTERS_OF_DEEPSEEK, _MARKS, r"\s+\Z", _HAN, r"\p{N}+"),
}
"""tokenizer.ggml.pre |-> patterns that cut a text, one after the other."""
WHOLE_PIECES = {"llama-bpe", "llama-v3", "llama3", "falcon3", "tekken"}
"""Those where a piece that is a token is taken whole."""


def byte_level_ids(text: str, pre: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    ranks, alphabet = {merge: rank for rank, merge in enumerate(merges)}, byte_alphabet()
    ids = []
    for piece in _cut(text, CUTS[pre]):
        spelled = "".join(alphabet[byte] for byte in piece.encode())
        parts = [spelled] if pre in WHOLE_PIECES and spelled in vocab else _merged(list(spelled), ranks)
        ids += [vocab[part] for part in parts]
    return ids


def _cut(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Matches of each pattern become pieces, and so does what lies between them."""
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def _merged(parts: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best is None or best not in ranks:
            return parts
        at = pairs.index(best)
        parts = [*parts[:at], "".join(best), *parts[at + 2 :]]


def sentence_piece_ids(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """The neighbours whose union has the best score become one, until none is a token; bytes where no token is."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [left + right for left, right in pairwise(parts)]
        known = [(-scores[vocab[union]], at) for at, union in enumerate(unions) if union in vocab]
        if not known:
            break
        at = min(known)[1]
        parts = [*parts[:at], unions[at], *parts[at + 2 :]]
    spelled = [[vocab[part]] if part in vocab else [vocab[f"<0x{b:02X}>"] for b in part.encode()] for part in parts]
    return [index for ids in spelled for index in ids]
