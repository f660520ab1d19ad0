"""Links in model folders: one rule for every file that is read of one."""

import json
import shutil
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import Checkpoint
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.fingerprint import model_fingerprint
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS

EXTRA = {
    "special_tokens_map.json": {"bos_token": "<|bos|>"},
    "added_tokens.json": {},
    "chat_template.json": {"chat_template": "x"},
}
"""Files that the tiny model does not have."""
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00003.safetensors",
    *EXTRA,
)


@pytest.fixture
def folder(tiny_models: Path, tmp_path: Path) -> Path:
    made = shutil.copytree(tiny_models / "llama_sharded", tmp_path / "model")
    for name, content in EXTRA.items():
        (made / name).write_text(json.dumps(content))
    return Path(made)


def opened(folder: Path) -> str:
    """Everything that any process reads of it."""
    TextCodec.load(folder)
    return Checkpoint.open(str(folder)).fingerprint


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_is_refused_with_the_way_out(folder: Path, name: str) -> None:
    """Wherever it leads: what lies there need not be of the model's maker, nor for clients."""
    target = folder.parent / "elsewhere"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    message = str(caught.value)
    assert f"{name}: a link that leads out of the model folder; put the file itself in its place (cp -L" in message
    assert "\n" not in message
    (folder / name).unlink()
    (folder / name).hardlink_to(target)
    opened(folder)


@pytest.mark.parametrize("name", FILES)
def test_what_leads_nowhere_near_a_model_is_not_read(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="a link that leads out of the model folder"):
        opened(folder)


@pytest.mark.parametrize("place", ["within", "snapshot", "old local-dir", "a link to a link"])
@pytest.mark.parametrize("name", FILES)
def test_links_within_and_into_a_hub_cache_are_followed(folder: Path, name: str, place: str) -> None:
    expected, cache = opened(folder), folder.parent / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    blob = folder / "real" / "file" if place == "within" else cache / "blobs" / "0123abc"
    blob.parent.mkdir(exist_ok=True)
    (folder / name).rename(blob)
    if place == "snapshot":
        (cache / "snapshots").mkdir()
        folder = folder.rename(cache / "snapshots" / "4567")
        (folder / name).symlink_to(Path("../../blobs/0123abc"))
    elif place == "a link to a link":
        (folder / "other").symlink_to(blob)
        (folder / name).symlink_to("other")
    else:
        (folder / name).symlink_to(blob)
    assert opened(folder) == expected


def test_blobs_that_are_a_link_are_no_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (folder / "chat_template.jinja").rename(tmp_path / "secrets" / "x")
    (folder / "models--a--b").mkdir()
    (folder / "models--a--b" / "blobs").symlink_to(tmp_path / "secrets")
    (folder / "chat_template.jinja").symlink_to(folder / "models--a--b" / "blobs" / "x")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: a link that leads out"):
        opened(folder)


def test_what_the_operator_names_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(folder)
    assert opened(tmp_path / "named") == opened(folder)
    file, _ = write_gguf(VARIANTS["llama"], tmp_path, Kind.F32)
    (tmp_path / "named.gguf").symlink_to(file)
    assert model_fingerprint(tmp_path / "named.gguf") == model_fingerprint(file)


def test_a_gguf_file_that_is_found_in_a_folder_follows_the_rule(tmp_path: Path) -> None:
    file, _ = write_gguf(VARIANTS["llama"], tmp_path, Kind.F32)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").symlink_to(file)
    with pytest.raises(ConfigError, match=r"m\.gguf: a link that leads out of the model folder"):
        load_spec(tmp_path / "model")
