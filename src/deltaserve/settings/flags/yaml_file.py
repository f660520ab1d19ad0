"""Reading and writing the YAML form of the settings: one flat mapping, no key twice."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.regular_file import read_regular
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.options import read_options

MAX_FILE_BYTES = 1 << 20
NOTHING: Mapping[str, str] = MappingProxyType({})
_MAX_BITS = 256
_NO_VALUE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_RESOLVED = {
    "tag:yaml.org,2002:bool": ("^(true|false)$", "tf"),
    "tag:yaml.org,2002:int": (r"^[-+]?(0|[1-9][0-9]*)$", "-+0123456789"),
    "tag:yaml.org,2002:float": (r"^([-+]?[0-9]+\.[0-9]+([eE][-+]?[0-9]+)?|\.nan|[-+]?\.inf)$", "-+0123456789."),
}
"""What is not a text: YAML itself would also read 0x10, 1_0, 017 and 1:30 as numbers, and `off` as a boolean."""
_UNRESOLVED = frozenset({*_RESOLVED, "tag:yaml.org,2002:null", "tag:yaml.org,2002:timestamp"})


class _Loader(yaml.SafeLoader):
    """SafeLoader where a repeated key is an error, and only what looks like one is a number or a boolean.

    No aliases: a few lines of them stand for more values than any memory holds, and no option needs one.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases have no use here", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ValueError
        except _NO_VALUE:  # PyYAML calls int() and the like on any text behind a tag
            problem = f"no value of the type {node.tag.rpartition(':')[2]}, or one too large"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("_", "-")
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="<< has no use without anchors", problem_mark=key.start_mark)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key {name} occurs twice", problem_mark=key.start_mark)
            seen.add(name)
        return dict(super().construct_mapping(node, deep))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _UNRESOLVED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _first) in _RESOLVED.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def read_yaml(path: Path) -> dict[str, object]:
    """Key |-> value, keys with dashes. Raises ConfigError naming file and line; what keys mean is not checked here."""
    try:
        content = _Loader(read_regular(path, MAX_FILE_BYTES).decode()).get_single_data()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"--config {path}:{line}: {told}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: nested too deeply") from None
    except yaml.YAMLError:
        raise ConfigError(f"--config {path}: holds characters that YAML does not allow") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a mapping of option: value")
    return {str(key).replace("_", "-"): value for key, value in content.items()}


def write_yaml(settings: Settings, came_to: Mapping[str, str] = NOTHING) -> str:
    """All settings that have a value; `read_yaml` gives them back. `came_to`: field |-> a comment behind its value."""
    lines: list[str] = []
    group = ""
    for option in read_options():
        value = settings.model_dump()[option.group][option.field]
        if value is None:
            continue
        if option.group != group:
            group = option.group
            lines.append(f"# {group}")
        line = yaml.safe_dump({option.key: value}, width=10_000, allow_unicode=True).rstrip()
        lines.append(f"{line}  # {came_to[option.field]}" if option.field in came_to else line)
    return "\n".join(lines) + "\n"
