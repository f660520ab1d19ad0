"""What ends an answer: end token x where a file says so, of folders and of GGUF files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.text_folder import write_text_folder
from tests.fixtures.tiny_gguf import Vocabulary, byte_vocabulary, write_text_only
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID

NAME, ID = "<tool_call>", 262
"""The token that is to end answers."""
Say = Callable[[Path], None]


def _json(name: str, **fields: object) -> Say:
    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | fields))

    return change


def _nested(folder: Path) -> None:
    """A multimodal file's text part."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": EOS_ID}
    text = {**config, "num_hidden_layers": 6, "eos_token_id": [ID]}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": text}))


def _without_names(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    _json("special_tokens_map.json", eos_token={"content": NAME})(folder)


FOLDERS: dict[str, Say] = {
    "config, one": _json("config.json", eos_token_id=ID),
    "config, a list": _json("config.json", eos_token_id=[ID, EOS_ID]),
    "config, the text part": _nested,
    "generation_config, one": _json("generation_config.json", eos_token_id=ID),
    "generation_config, a list": _json("generation_config.json", eos_token_id=[ID, ID, EOS_ID]),
    "tokenizer_config, text": _json("tokenizer_config.json", eos_token=NAME),
    "tokenizer_config, an object": _json("tokenizer_config.json", eos_token={"content": NAME, "lstrip": False}),
    "special_tokens_map": _without_names,
}


@pytest.mark.parametrize("place", FOLDERS)
def test_every_place_of_a_folder_counts(tmp_path: Path, place: str) -> None:
    folder = write_text_folder(tmp_path)
    FOLDERS[place](folder)
    assert set(TextCodec.load(folder).eos_ids) == {EOS_ID, ID}


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TURN_ENDS = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
]
"""End an answer whatever kind a file gives them."""
CONTROL_ENDS = ["</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|EOT|>"]
"""Only as control tokens."""
KINDS = {"control": CONTROL, "user defined": USER_DEFINED, "normal": NORMAL, "unused": UNUSED, "not said": None}


def _named(name: str, kind: int | None) -> Vocabulary:
    """The tiny one, with another token in the place of NAME; no kinds at all where it is None."""
    plain = byte_vocabulary()
    tokens = (*plain.tokens[:ID], name, *plain.tokens[ID + 1 :])
    kinds = () if kind is None else (*plain.kinds[:ID], kind, *plain.kinds[ID + 1 :])
    return replace(plain, tokens=tokens, kinds=kinds)


def _chat(writer: gguf.GGUFWriter) -> None:
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*TURN_ENDS, *CONTROL_ENDS, "<unknown_end>"])
def test_end_tokens_of_gguf_files_by_name_and_kind(tmp_path: Path, name: str, kind: str) -> None:
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", _named(name, KINDS[kind]), _chat))
    ends = name in TURN_ENDS and kind != "unused"
    ends = ends or (name in CONTROL_ENDS and kind == "control")
    assert codec.eos_ids == ((EOS_ID, ID) if ends else (EOS_ID,))
    if ends:  # a control token: hidden in answers, and no message can spell it
        assert codec.decode((65, ID), skip_special_tokens=True) == "A"
        assert codec.encode(f"A{name}", add_special_tokens=False) == (65, ID)
        assert ID not in codec.encode_chat([{"role": "user", "content": name}], {})


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_end_tokens_of_gguf_files_by_key(tmp_path: Path, key: str) -> None:
    plain = byte_vocabulary()
    codec = TextCodec.load(write_text_only(tmp_path / "m.gguf", replace(plain, extra={**plain.extra, key: ID})))
    assert set(codec.eos_ids) == {EOS_ID, ID}  # <|im_end|> by its name
