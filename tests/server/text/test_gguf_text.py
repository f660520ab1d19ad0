"""Tokenizers in GGUF files against plain ones, on text of many languages; chat templates; what is refused."""

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from deltaserve.core.errors import ConfigError
from deltaserve.model.formats.gguf_header import read_header
from deltaserve.server.text.pre_tokenizers import PRE_TOKENIZERS
from deltaserve.server.text.text_codec import SamplingDefaults, TextCodec
from tests.fixtures.language_model import language_model
from tests.fixtures.tiny_gguf import Kind, Vocabulary, Write, byte_vocabulary, write_gguf, write_text_only
from tests.fixtures.tiny_models import VARIANTS
from tests.server.text.bpe_reference import CUTS, byte_level_ids, sentence_piece_ids

Trained = tuple[dict[str, int], list[tuple[str, str]]]
_NORMAL, _CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
_USER_DEFINED, _UNUSED = gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED

TEXTS = (
    "Hello world, it's 2024: we'VE 12345 tokens, don't we?  Two spaces.\n\n  Indented\tand tabbed\r\nend   ",
    "Straße, naïve café, Ångström, İstanbul, ﬁne ligatures, ½ and ² and Ⅷ; e\u0301 decomposed",
    "Привет, мир! Съешь ещё этих мягких французских булок — 1 234,56 ₽",
    "你好,世界。今天是2024年11月22日。日本語のテキストとカタカナ、한국어 텍스트도.",
    "مرحبا بالعالم ١٢٣ שלום עולם नमस्ते दुनिया १२३ สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flags 🇩🇪 and \U0001d518\U0001d52b \u200b\u00a0\u3000spaces",
    "def f(x):\n    return {'a': [1, 2.5e-10], \"b\": x**2}  # https://example.org/?q=a&b=%20\n",
    "MixedCASE camelCase SHOUTing snake_case 'Twas THE'RE I'LL \u017fhe'\u017f",
    "",
    " ",
    "\n\n\n",
)


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Vocabulary and merges of a small BPE that knows pieces of all these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(4)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _vocabulary(trained: Trained, pre: str, extra: Mapping[str, int] | None = None) -> Vocabulary:
    vocab, merges = trained
    tokens = sorted(vocab, key=lambda token: vocab[token])
    specials = ["<|im_start|>", "<|im_end|>", "<think>"]
    kinds = [*[_NORMAL] * len(tokens), _CONTROL, _CONTROL, _USER_DEFINED, _UNUSED]
    joined = tuple(f"{left} {right}" for left, right in merges)
    ends = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1, **(extra or {})}
    return Vocabulary((*tokens, *specials, "[PAD9]"), tuple(map(int, kinds)), joined, pre=pre, extra=ends)


@pytest.fixture(scope="module")
def codecs(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextCodec]:
    folder = tmp_path_factory.mktemp("gguf")

    @cache
    def codec(pre: str) -> TextCodec:
        return TextCodec.load(write_text_only(folder / f"{pre}.gguf", _vocabulary(trained, pre)))

    return codec


# ---------------------------------------------------------------- byte-level BPE


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_are_those_of_a_plain_bpe(trained: Trained, codecs: Callable[[str], TextCodec], pre: str) -> None:
    codec = codecs(pre)
    for text in TEXTS:
        plain = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        ids = codec.encode(text, add_special_tokens=False)
        assert list(ids) == byte_level_ids(plain, pre, *trained), text
        assert codec.decode(ids) == plain


def test_ids_of_a_real_vocabulary() -> None:
    file = language_model()
    codec, metadata = TextCodec.load(file), read_header(file).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    for text in TEXTS:
        ids = codec.encode(text, add_special_tokens=False)
        assert list(ids) == byte_level_ids(text, "smollm", vocab, merges)
        assert codec.decode(ids) == text


def test_every_kind_of_cut_is_compared() -> None:
    assert PRE_TOKENIZERS.keys() == CUTS.keys()
    assert len({tuple(CUTS[pre]) for pre in CUTS}) == 9


@pytest.mark.parametrize("pre", ["", "default"])
def test_a_file_that_does_not_say_how_text_is_cut_is_served_with_a_warning(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture, pre: str
) -> None:
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", _vocabulary(trained, pre)))
    (told,) = caplog.messages
    assert told.startswith("m.gguf: tokenizer.ggml.pre does not say how the model's tokenizer cuts text; ")
    for text in TEXTS:
        assert list(codec.encode(text, add_special_tokens=False)) == byte_level_ids(text, "default", *trained)


def test_text_that_is_streamed_is_the_same_text(codecs: Callable[[str], TextCodec]) -> None:
    """One id at a time, and never part of a character."""
    codec = codecs("smollm")
    for text in TEXTS:
        stream = codec.detokenizer()
        shown = [stream.push(token) for token in codec.encode(text, add_special_tokens=False)]
        assert "".join([*shown, stream.flush()]) == text
        assert all("\ufffd" not in piece for piece in shown)


@pytest.mark.parametrize(
    ("pre", "extra", "num_before", "num_after"),
    [
        ("smollm", {}, 0, 0),
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"add_bos_token": False}, 0, 0),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, 1, 1),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(
    trained: Trained, tmp_path: Path, pre: str, extra: Mapping[str, int], num_before: int, num_after: int
) -> None:
    vocabulary = _vocabulary(trained, pre, extra)
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", vocabulary))
    plain = codec.encode("hello", add_special_tokens=False)
    before, after = (vocabulary.tokens.index(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert codec.encode("hello") == (*[before] * num_before, *plain, *[after] * num_after)


def test_control_tokens_of_a_user_are_text(
    trained: Trained, codecs: Callable[[str], TextCodec], tmp_path: Path
) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    vocabulary = _vocabulary(trained, "smollm")
    file = write_text_only(tmp_path / "m.gguf", vocabulary, lambda writer: writer.add_chat_template(template))
    codec = TextCodec.load(file)
    start, end = len(trained[0]), len(trained[0]) + 1
    ids = codec.encode_chat([{"role": "user", "content": "a<|im_end|>b<think>"}], {})
    assert (ids[0], ids[-1], ids[1:-1].count(end)) == (start, end, 0)
    assert codec.decode(ids) == "<|im_start|>a<|im_end|>b<think><|im_end|>"
    assert codec.encode("<|im_end|><think>", add_special_tokens=False) == (end, end + 1)
    assert codec.eos_ids == (end,)


def test_rows_that_only_fill_the_table_are_no_text(trained: Trained, codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("smollm")
    assert codec.vocab_size == len(trained[0]) + 4
    assert codec.token_bytes(codec.vocab_size - 1) == b""
    assert not codec.has_chat_template


def test_a_whole_model_is_served_as_its_folder(tmp_path: Path) -> None:
    file, folder = write_gguf(VARIANTS["qwen3"], tmp_path, Kind.F32)
    ours, theirs = TextCodec.load(file), TextCodec.load(folder)
    messages = [{"role": "user", "content": "Grüße \U0001f600"}]
    assert ours.encode_chat(messages, {}) == theirs.encode_chat(messages, {})
    assert (ours.eos_ids, ours.vocab_size) == (theirs.eos_ids, theirs.vocab_size)
    assert [ours.token_bytes(token) for token in range(264)] == [theirs.token_bytes(token) for token in range(264)]


def test_sampling_that_the_author_recommends(tmp_path: Path) -> None:
    def recommend(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 0.75)

    file = write_text_only(tmp_path / "m.gguf", byte_vocabulary(), recommend)
    assert TextCodec.load(file).defaults == SamplingDefaults(temperature=0.5, top_p=0.75, top_k=20)
    assert TextCodec.load(file, sampling="openai").defaults == SamplingDefaults()


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({}, SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)),
        ({"temp": 1.0}, SamplingDefaults()),
        ({"min_p": 0.25}, SamplingDefaults(min_p=0.25)),
    ],
    ids=str,
)
def test_a_file_that_recommends_no_sampling_gets_that_of_local_servers(
    tmp_path: Path, recommended: dict[str, float], expected: SamplingDefaults
) -> None:
    """Whatever it recommends is all that it recommends."""

    def recommend(writer: gguf.GGUFWriter) -> None:
        for key, value in recommended.items():
            writer.add_float32(f"general.sampling.{key}", value)

    file = write_text_only(tmp_path / "m.gguf", byte_vocabulary(), recommend)
    assert TextCodec.load(file).defaults == expected
    assert TextCodec.load(file, sampling="openai").defaults == SamplingDefaults()


def test_a_token_id_of_minus_one_says_that_there_is_none(tmp_path: Path) -> None:
    none = {"padding_token_id": 2**32 - 1, "unknown_token_id": 2**32 - 1, "eot_token_id": 2**32 - 1}
    plain = byte_vocabulary()
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", replace(plain, extra={**plain.extra, **none})))
    assert codec.eos_ids == (258,)


def test_odd_sampling_is_no_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def recommend(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.top_p", 7.0)

    file = write_text_only(tmp_path / "m.gguf", byte_vocabulary(), recommend)
    assert TextCodec.load(file).defaults == SamplingDefaults()
    assert caplog.messages == ["recommended sampling: top_p 7.0 is used as 1"]


# ---------------------------------------------------------------- SentencePiece


def _sentence_piece() -> Vocabulary:
    """Bytes, then pieces: longer ones have better scores, as after training."""
    words = [
        "▁",
        *"Helo,wrdtasin",
        "é",
        "▁H",
        "el",
        "lo",
        "▁w",
        "or",
        "ld",
        "▁Hel",
        "▁Hello",
        "▁wor",
        "▁world",
        "in",
        "▁in",
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(1000 - 10 * len(word) - at) for at, word in enumerate(words)]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Vocabulary(tuple(tokens), tuple(kinds), scores=tuple(scores), extra=ends)


def test_sentence_piece_ids(tmp_path: Path) -> None:
    vocabulary = _sentence_piece()
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", vocabulary))
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    for text in ("Hello world", "Hello, world in Hello", "é 你好 \U0001f600", "  Hello  "):
        ids = codec.encode(text, add_special_tokens=False)
        assert list(ids) == sentence_piece_ids(text, vocab, list(vocabulary.scores))
        assert codec.decode(ids) == f" {text}"
    assert codec.encode("Hello") == (1, vocab["▁Hello"])
    assert codec.eos_ids == (2,)


# ---------------------------------------------------------------- refused


def _replaced(**changes: object) -> Vocabulary:
    return replace(byte_vocabulary(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (_replaced(pre="jais"), "tokenizer.ggml.pre is 'jais', expected one of gpt-2, smollm,"),
        (_replaced(merges=("ab",)), "tokenizer.ggml.merges has 'ab', expected two parts"),
        (_replaced(merges=("a nothing",)), "not a usable tokenizer ("),
        (_replaced(kinds=(1, 2)), "272 tokens, but 2 values of token_type"),
        (_replaced(tokens=("a", "a", *byte_vocabulary().tokens[2:])), "tokenizer.ggml.tokens has 'a' twice"),
        (_replaced(scores=(0.5,)), "272 tokens, but 1 scores"),
        (
            _replaced(extra={"bos_token_id": 271, "add_bos_token": True}),
            "m.gguf: tokenizer.ggml.bos_token_id is 271, expected a token of text to add to prompts, not the unused '[",
        ),
        (_replaced(extra={"eos_token_id": 271, "add_eos_token": True}), "tokenizer.ggml.eos_token_id is 271, expected"),
        (
            _replaced(extra={"bos_token_id": 271}, pre="llama-bpe"),
            "tokenizer.ggml.bos_token_id is 271, expected a token",
        ),
        (_replaced(extra={"eos_token_id": 272}), "tokenizer.ggml.eos_token_id is 272, expected 0 .. 271"),
    ],
)
def test_a_vocabulary_that_cannot_be_used(tmp_path: Path, vocabulary: Vocabulary, text: str) -> None:
    refused(write_text_only(tmp_path / "m.gguf", vocabulary), text)


def _lacking(*lost: int) -> Vocabulary:
    tokens = [f"<lost{at}>" if at in lost else token for at, token in enumerate(byte_vocabulary().tokens)]
    return _replaced(tokens=tuple(tokens))


def _pieces_only() -> Vocabulary:
    """Neither bytes nor a token for the unknown."""
    whole = _sentence_piece()
    kinds = tuple(5 if kind in (2, 6) else kind for kind in whole.kinds)
    ends = {name: token for name, token in whole.extra.items() if name != "unknown_token_id"}
    return replace(whole, kinds=kinds, extra=ends)


@pytest.mark.parametrize(
    ("vocabulary", "lost"),
    [
        (_lacking(ord("h")), "'h'"),
        (_lacking(ord(" ")), "' '"),
        (_lacking(ord("\n")), "'\\n'"),
        (_lacking(*range(256)), "'\\n !\"#$%&"),
        (_pieces_only(), "'\\n!"),
    ],
    ids=["a letter", "the space", "the end of line", "all", "SentencePiece without bytes"],
)
def test_a_vocabulary_that_plain_text_would_vanish_from(tmp_path: Path, vocabulary: Vocabulary, lost: str) -> None:
    file = write_text_only(tmp_path / "m.gguf", vocabulary)
    refused(file, f"m.gguf: the vocabulary has no token of the characters {lost[:-1]}")
    refused(file, "and there is no token for the unknown: they would vanish from prompts")


@pytest.mark.parametrize("vocabulary", [byte_vocabulary(), _sentence_piece()], ids=["bytes", "SentencePiece"])
def test_a_token_too_long_to_be_cut_everywhere(tmp_path: Path, vocabulary: Vocabulary) -> None:
    tokens = (*vocabulary.tokens[:-1], "a" * 400_000)
    file = write_text_only(tmp_path / "m.gguf", replace(vocabulary, tokens=tokens))
    refused(file, "m.gguf: tokenizer.ggml.tokens has a token of 400000 characters, at most 1024 are read")


def test_bytes_of_other_scripts_that_are_lost_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TextCodec.load(write_text_only(tmp_path / "m.gguf", _lacking(0xC3, 0xE4, 0x01, 0xC0, 0xF1)))
    assert [message.partition(", and")[0] for message in caplog.messages] == [
        "m.gguf: the vocabulary has no token of 2 bytes of UTF-8 (c3 e4)"
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.add_tokenizer_model("bert"), "tokenizer.ggml.model is 'bert', expected one of gpt2, llama"),
        (lambda w: w.add_chat_template("{{ 1 + }}"), "m.gguf: the chat template does not compile (line 1: unexpected"),
        (lambda w: w.add_chat_template("{{ 1 + }}"), "; write the file anew with another (gguf-new-metadata "),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicated key")
def test_other_metadata(tmp_path: Path, change: Write, text: str) -> None:
    refused(write_text_only(tmp_path / "m.gguf", byte_vocabulary(), change), text)


def refused(file: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TextCodec.load(file)
    message = str(caught.value)
    assert text in message
    assert "\n" not in message
