"""Odd files of a tokenizer: one line that names the file and the field, before anything is served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.library_errors import library_errors
from deltaserve.server.text.text_codec import TextCodec

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
HALF_PAIR = "\ud800"


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder that a test may damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def refused(folder: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TextCodec.load(folder)
    message = str(caught.value)
    assert text in message
    assert "\n" not in message
    assert len(message) < 400


LISTS = [
    (file, {name: value}, f"{file}: {name} is {value!r}, expected a list of tokens")
    for file in (CONFIG, MAP)
    for name in ("additional_special_tokens", "extra_special_tokens")
    for value in (5, True, 1.5, "<x>")
]
TOKENS = [
    (CONFIG, {"additional_special_tokens": [HALF_PAIR]}, f"{CONFIG}: additional_special_tokens holds half a surrogate"),
    (MAP, {"extra_special_tokens": {"a": {"content": HALF_PAIR}}}, f"{MAP}: extra_special_tokens holds half a surrog"),
    (CONFIG, {"added_tokens_decoder": {"264": {"content": HALF_PAIR}}}, "added_tokens_decoder: 264 holds half a surr"),
    (CONFIG, {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, "added_tokens_decoder has '99999"),
    (CONFIG, {"added_tokens_decoder": {"-1": {"content": "a"}}}, "added_tokens_decoder has '-1'"),
    (CONFIG, {"added_tokens_decoder": {"264": 5}}, "added_tokens_decoder has '264': 5, expected an id and its token"),
    (CONFIG, {"added_tokens_decoder": {"264": {"content": 5}}}, "added_tokens_decoder has token 264 without content"),
    (CONFIG, {"added_tokens_decoder": [5]}, f"{CONFIG}: added_tokens_decoder is [5], expected an object"),
    (CONFIG, {"added_tokens_decoder": {"999": {"content": "<z>"}}}, f"{CONFIG}: '<z>' has id 999, but 266 follows"),
    (ADDED, {HALF_PAIR: 264}, f"{ADDED}: '\\ud800' holds half a surrogate pair"),
    (ADDED, {"<z>": "264"}, f"{ADDED}: '<z>' is '264', expected an id"),
    (ADDED, {"<z>": 999}, f"{ADDED}: '<z>' has id 999, but 266 follows in tokenizer.json"),
    (ADDED, {"<z>": -1}, f"{ADDED}: '<z>' has id -1, but 266 follows"),
    (ADDED, {"<z>": 10**4000}, f"{ADDED}: '<z>' has id 10000"),
]


@pytest.mark.parametrize(("file", "changes", "text"), [*LISTS, *TOKENS], ids=lambda value: str(value)[:60])
def test_special_tokens_that_are_none(folder: Path, file: str, changes: dict[str, Any], text: str) -> None:
    edit(folder / file, changes)
    refused(folder, text)


def test_a_vocabulary_without_a_letter_is_refused_unless_there_is_a_token_for_the_unknown(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"] = {token if token not in "eE" else f"<{token}>": at for token, at in model["vocab"].items()}
    edit(folder / "tokenizer.json", {"model": model})
    refused(folder, "model: the vocabulary has no token of the characters 'Ee', and there is no token for the unknown")
    edit(folder / "tokenizer.json", {"model": {**model, "unk_token": "!"}})
    assert TextCodec.load(folder).encode("hey") == tuple(b"h!y")


def test_an_id_far_beyond_every_vocabulary_is_refused_at_once(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit(folder / "tokenizer.json", {"model": {**model, "vocab": {**model["vocab"], "far": 4_000_000_000}}})
    refused(folder, "tokenizer.json: id 4000000000 is outside the model's vocabulary of")


def test_a_tokenizer_that_was_never_downloaded(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    refused(folder, "tokenizer.json: a Git LFS pointer, not the file: `git lfs pull` gets it")


def test_letters_that_the_normalizer_never_asks_for_may_be_lacking(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"] = {f"<{token}>" if at in range(65, 91) else token: at for token, at in model["vocab"].items()}
    edit(folder / "tokenizer.json", {"model": model, "normalizer": {"type": "Lowercase"}})
    assert TextCodec.load(folder).encode("Hey") == tuple(b"hey")
    edit(folder / "tokenizer.json", {"normalizer": None})
    refused(folder, "the vocabulary has no token of the characters 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'")


TRUNCATION = {"max_length": 1, "stride": 5, "strategy": "LongestFirst", "direction": "Right"}
PADDING = {
    "strategy": "BatchLongest",
    "direction": "Right",
    "pad_to_multiple_of": 0,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}


@pytest.mark.parametrize("changes", [{"truncation": TRUNCATION}, {"padding": PADDING}], ids=str)
def test_truncation_and_padding_that_the_library_panics_at_are_off(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "tokenizer.json", changes)
    assert TextCodec.load(folder).encode("hello") == tuple(b"hello")


def test_a_panic_of_the_library_is_one_line(folder: Path) -> None:
    """The pattern tries every way of cutting its text until the library gives up."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    before = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
    edit(folder / "tokenizer.json", {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, before]}})
    (folder / "chat_template.jinja").write_text("a" * 51 + "!")
    refused(folder, "chat_template.jinja: the tokenizer fails on what the chat template makes of one plain message (")


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_is_no_error_of_a_file(ends: type[BaseException]) -> None:
    with pytest.raises(ends), library_errors("a file"):
        raise ends


def test_an_error_that_says_enough_stays() -> None:
    with pytest.raises(ConfigError, match=r"\Ab\Z"), library_errors("a"):
        raise ConfigError("b")
