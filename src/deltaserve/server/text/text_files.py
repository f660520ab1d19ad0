"""The text side of a model as its files have it: tokenizer, chat template, special tokens, sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deltaserve.core.errors import ConfigError
from deltaserve.model.fingerprint import MAX_FILE_BYTES
from deltaserve.model.folder_files import read_in_folder
from deltaserve.model.json_object import read_json_if_there
from deltaserve.model.open_source import format_half
from deltaserve.model.source import TensorSource
from deltaserve.model.stand_ins import stand_in
from deltaserve.server.text.library_errors import library_errors
from deltaserve.server.text.special_tokens import TokenMaps, whole
from deltaserve.server.text.template import MAX_TEMPLATE_BYTES

_TO_FAST = (
    "only tokenizer.json is read; transformers writes it, from tokenizer.model, vocab.json with merges.txt or "
    "a tiktoken file: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A chat template, and what its owner is told of it when it cannot be used."""

    text: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text side of a Hugging Face folder, or of a GGUF file in the same form."""

    generation: Mapping[str, object]
    """Content of generation_config.json; empty without one."""
    special_names: Mapping[str, str]
    """bos_token, eos_token, ... for the template."""
    tokenizer: Tokenizer
    template: TemplateSource | None


def read_files(source: TensorSource, model: Path) -> TextFiles:
    """The text side of a checkpoint, by its format, or else as a folder has it. Raises ConfigError as `read_folder`."""
    half = format_half(source, "text")
    if half is None:
        return read_folder(model)
    files: TextFiles = half.read_text(source)
    return files


def read_folder(folder: Path) -> TextFiles:
    """Raises ConfigError naming the file and what is wrong with it."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    maps = TokenMaps(*(_values(folder / name) for name in names))
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    maps.complete(tokenizer)
    generation = _values(folder / "generation_config.json")
    return TextFiles(generation, maps.names(), tokenizer, _template_source(folder, maps.config))


def _values(path: Path) -> dict[str, Any]:
    """Empty when nothing has this name."""
    fields = read_json_if_there(path)
    return {} if fields is None else fields.values


def _read_tokenizer(path: Path) -> Tokenizer:
    content = read_in_folder(path, MAX_FILE_BYTES)
    if content is None:
        raise ConfigError(f"{path.name} is missing in {path.parent}; {_TO_FAST}")
    instead = stand_in(content)
    if instead is not None:
        raise ConfigError(f"{path}: {instead}")
    with library_errors(f"{path}: not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    with library_errors(f"{path}: cannot encode a plain word"):
        tokenizer.encode("hello", add_special_tokens=True)
    return tokenizer


def _template_source(folder: Path, tokenizer_config: Mapping[str, object]) -> TemplateSource | None:
    """chat_template.jinja, else the entry of chat_template.json or tokenizer_config.json.

    An entry is a string, or a list with one named `default`; one that is neither is refused even where it is not used.
    """
    path = folder / "chat_template.json"
    given = [
        _template_entry(path, _values(path).get("chat_template")),
        _template_entry(folder / "tokenizer_config.json", tokenizer_config.get("chat_template")),
    ]
    path = folder / "chat_template.jinja"
    content = read_in_folder(path)
    if content is not None:
        return _whole_template(content, str(path), "mend the file, or remove it to serve completions without chats")
    return given[0] or given[1]


def read_template(path: Path) -> TemplateSource:
    """A chat template that the operator names in place of the model's own. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--chat-template {path}: {error.strerror or error}; name a file of a Jinja template"
        ) from error
    return _whole_template(content, f"--chat-template {path}", "mend the file, or leave the flag out")


def _whole_template(content: bytes, where: str, remedy: str) -> TemplateSource:
    try:
        source = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8; {remedy}") from error
    if not source.strip():
        raise ConfigError(f"{where}: an empty template, by which every chat would be an empty prompt; {remedy}")
    return TemplateSource(source, where, remedy)


def _template_entry(path: Path, value: object) -> TemplateSource | None:
    if value is None:
        return None
    remedy = "mend its chat_template, or remove it to serve completions without chats"
    if isinstance(value, list):
        value = next((e.get("template") for e in value if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: chat_template is neither a string nor a list with a default; {remedy}")
    return TemplateSource(whole(value, f"{path}: chat_template"), str(path), remedy)
