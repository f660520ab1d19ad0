"""Quoted control tokens change no other id: a text is encoded in one piece, whatever stands in it."""

from collections.abc import Callable, Mapping

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import byte_level

CONTROL = ("<s>", "</s>", "<|user|>")
TEMPLATE = "{% for m in messages %}<s>[INST] {{ m.content }} [/INST]</s>{% endfor %}"


def _sentence_piece(prepare: Callable[[Tokenizer], None]) -> Tokenizer:
    letters = [*"\u2581Goatn[]/INST<>|user ", "\u2581[", "\u2581G", "Go", "\u2581Go", "\u2581on"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(["<unk>", *letters]))}
    merges = [("\u2581", "["), ("\u2581", "G"), ("G", "o"), ("\u2581G", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    prepare(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer


def _metaspace(scheme: str, *, split: bool) -> Callable[[Tokenizer], None]:
    def prepare(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)

    return prepare


def _prepend(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


TOKENIZERS: Mapping[str, Callable[[], Tokenizer]] = {
    "Metaspace first": lambda: _sentence_piece(_metaspace("first", split=False)),
    "Metaspace first, split": lambda: _sentence_piece(_metaspace("first", split=True)),
    "Metaspace always": lambda: _sentence_piece(_metaspace("always", split=False)),
    "Metaspace never": lambda: _sentence_piece(_metaspace("never", split=False)),
    "a normalizer that prepends": lambda: _sentence_piece(_prepend),
    "bytes": lambda: byte_level(CONTROL),
}


def codec_of(tokenizer: Tokenizer) -> TextCodec:
    return TextCodec(tokenizer, 300, [], ChatTemplate(TEMPLATE, CONTROL, {}))


@pytest.mark.parametrize("message", ["Go on", "Go on <", "Go <|", "<", "Go on </", "<|use", "Go <|user| on"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_ids_are_those_of_the_text_in_one_piece(name: str, message: str) -> None:
    tokenizer = TOKENIZERS[name]()
    wanted = tokenizer.encode(f"<s>[INST] {message} [/INST]</s>", add_special_tokens=False).ids
    assert list(codec_of(tokenizer).encode_chat([{"role": "user", "content": message}], {})) == wanted


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_quoted_control_token_changes_no_id_beside_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    codec = codec_of(tokenizer)
    ids = list(codec.encode_chat([{"role": "user", "content": "Go </s> on"}], {}))
    control = [token for token in ids if token in set(codec.control_ids.values())]
    assert control == [codec.control_ids["<s>"], codec.control_ids["</s>"]]
    plain = list(codec.encode_chat([{"role": "user", "content": "Go on"}], {}))
    assert ids[:4] == plain[:4]
    assert codec.decode(ids).replace(" ", "") == "<s>[INST]Go</s>on[/INST]</s>"
