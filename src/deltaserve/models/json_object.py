"""JSON files of a model folder."""

import json
from pathlib import Path

from deltaserve.base.errors import ConfigError
from deltaserve.files.regular_file import read_if_there
from deltaserve.models.fields import Fields

_MAX_JSON_BYTES = 16 << 20


def read_json(path: Path) -> Fields:
    """A JSON object. The message names the file, not its folder."""
    fields = read_json_if_there(path)
    if fields is None:
        raise ConfigError(f"{path.name}: not found in the model folder")
    return fields


def read_json_if_there(path: Path) -> Fields | None:
    """None when nothing has this name."""
    try:
        content = read_if_there(path, _MAX_JSON_BYTES)
        values = None if content is None else json.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: not readable as JSON: {str(error)[:100]}") from None
    if content is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name}: expected a JSON object")
    return Fields(values, path.name)
