"""How text is cut before the merges of a byte-level BPE, by what GGUF files call it (tokenizer.ggml.pre).

The cuts are those of the models' own tokenizers, as llama.cpp has them; its test vectors are ours, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace("{1,3}", "")
_WORDS_OF_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN_AND_HANGUL = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_LETTERS_OF_DEEPSEEK = (
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-"
    r"\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-"
    r"\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-"
    r"\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-"
    r"\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}"
    r"\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-"
    r"\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}"
    r"\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}"
    r"\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-"
    r"\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}]+"
)
"""Letters that have cases."""
_MARKS_OF_DEEPSEEK = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before the merges of a byte-level BPE."""

    words: tuple[str, ...] = ()
    """Patterns of a piece: each cuts what the one before left. What lies between matches is a piece, too. Empty: that
    of GPT-2."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """Where the file does not say."""
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.words:
            cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.words]
            return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.single_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        return words


DEFAULT = "default"
"""llama.cpp's for files that do not say. No model's own."""
_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer((_WORDS_OF_LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": PreTokenizer((_WORDS_OF_LLAMA3,)),
    "tekken": PreTokenizer((_WORDS_OF_TEKKEN,), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizer((_WORDS_OF_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_WORDS_OF_QWEN2,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _LETTERS_OF_DEEPSEEK, _MARKS_OF_DEEPSEEK, r"\s+$", _HAN_AND_HANGUL, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS_OF_GPT2, "[0-9][0-9][0-9]")),
    "mpt": _GPT2,
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _WORDS_OF_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Value of tokenizer.ggml.pre |-> what it means. Another one is refused: cut otherwise, text becomes other tokens."""
