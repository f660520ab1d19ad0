"""JSON files of a model folder."""

import json
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.folder_files import read_in_folder
from deltaserve.model.other_layouts import other_layout


def read_json(path: Path) -> Fields:
    """A JSON object. The message names the file, not its folder."""
    fields = read_json_if_there(path)
    if fields is None:
        raise ConfigError(f"{path.name}: not found in the model folder{other_layout(path.parent)}")
    return fields


def read_json_if_there(path: Path) -> Fields | None:
    """Fields of a JSON file; None when nothing has this name."""
    content = read_in_folder(path)
    try:
        values = None if content is None else json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: not readable as JSON ({_reason(error)})") from None
    if content is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name}: expected a JSON object")
    return Fields(values, path.name)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, RecursionError):
        return "too many lists and objects in each other"
    return str(error).partition(":")[0][:100]  # a number of too many digits; the rest is advice for programmers
