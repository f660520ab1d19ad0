"""The recall model's tokenizer: every byte is a token, then special tokens, roles and 128 whole names.

No merges and no download; `decode(encode(text)) == text` for every text. A name's token includes the space before it,
as words do in ordinary vocabularies, so facts can be typed: ` rada ruga; ruga buse;`.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltaserve.commands.load.recall import FIRST_NAME, NUM_NAMES

BOS, IM_START, IM_END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (BOS, IM_START, IM_END, PAD, "<think>", "</think>", "<tool_call>", "</tool_call>")
ROLES = ("system", "user", "assistant")
BOS_ID, IM_START_ID, IM_END_ID, PAD_ID = range(256, 260)
USER_ID, ASSISTANT_ID = 265, 266

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def names() -> tuple[str, ...]:
    """The words of ids FIRST_NAME, FIRST_NAME + 1, ...: four letters each, always the same."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    words = [a + b + c + d for a in consonants for b in vowels for c in consonants for d in vowels]
    return tuple(Random(0).sample(words, NUM_NAMES))


def byte_alphabet() -> list[str]:
    """The printable character by which byte-level vocabularies write each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def build_tokenizer(max_len: int) -> Any:
    """A `PreTrainedTokenizerFast` with the chat template, ready for `save_pretrained`."""
    tokenizer = word_tokenizer(SPECIALS, (*ROLES, *(" " + name for name in names())), CHAT_TEMPLATE, max_len)
    assert tokenizer.convert_tokens_to_ids(" " + names()[0]) == FIRST_NAME
    return tokenizer


def word_tokenizer(specials: Sequence[str], words: Sequence[str], template: str, max_len: int) -> Any:
    """Every byte is a token, then come `specials`, SPECIALS first, and `words`, each one token wherever it occurs."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=template,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
