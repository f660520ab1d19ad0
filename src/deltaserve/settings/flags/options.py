"""The settings tree seen as a flat list of options: what --help, YAML and the environment have in common."""

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from deltaserve.core.errors import ConfigError
from deltaserve.settings.config import (
    Advertised,
    BranchWords,
    Devices,
    Group,
    Names,
    OriginList,
    Port,
    Settings,
    Share,
    Text,
    Transports,
    WorkerList,
)

_MAX_GUESSED = 80
_MISSPELT = 0.8
_MISSPELT_SHORT = 0.75
_SHORT = 5
"""Likeness of a slip of the fingers; in a name of so many letters one slip is more. Below it lie the flags of other
servers, which mean something else."""
ENV_PREFIX = "DELTASERVE_"
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_METAVARS = (
    (Share, "X"),
    (WorkerList, "LIST"),
    (Advertised, "HOST[:PORT]"),
    (Devices, "LIST"),
    (Transports, "LIST"),
    (Names, "NAME"),
    (OriginList, "LIST"),
)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the settings tree."""

    group: str
    """Attribute of Settings, and heading in --help."""
    field: str
    annotation: Any
    default: object
    help: str
    commands: tuple[str, ...]
    """The only commands whose flag it is; empty: all."""
    use: str = "common"
    """`rare`: --help-all has its flag, and --help has not."""

    @property
    def key(self) -> str:
        """YAML key, and flag without its dashes."""
        return self.field.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.field.upper()

    @property
    def allowed(self) -> str:
        """Allowed values in words, for error lines and --help."""
        return " or ".join(_allowed(self.annotation))

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be, when it may be nothing else."""
        return _words(self.annotation)

    @property
    def is_free_text(self) -> bool:
        return any(part is Text or part is Names for part in _members(self.annotation))

    @property
    def is_list_of_names(self) -> bool:
        """May be several words of a command line, or a list in a file, as well as one text with commas."""
        return not {Names, OriginList}.isdisjoint(_members(self.annotation))

    @property
    def is_count(self) -> bool:
        return int in set(_plain_types(self.annotation)) and self.annotation not in (Port, Port | None)

    @property
    def metavar(self) -> str:
        """What --help writes for the value."""
        named = next((text for kind, text in _METAVARS if kind in _members(self.annotation)), None)
        return "|".join(self.choices) or named or ("N" if self.is_count else self.field.split("_")[-1].upper())

    @property
    def is_switch(self) -> bool:
        return self.annotation is bool

    def check(self, value: object, where: str) -> Any:
        """The value itself. Raises ConfigError naming `where`, value and what is allowed."""
        try:
            return TypeAdapter(self.annotation, config=_STRICT).validate_python(value)
        except ValidationError:
            raise ConfigError(f"{where} {_shown(value)}: must be {self.allowed}") from None

    def parse(self, text: str, where: str) -> Any:
        """The value of a text from a flag or the environment, checked as `check` does."""
        return self.check(_from_text(text, set(_plain_types(self.annotation))), where)


def read_options() -> tuple[Option, ...]:
    """All options in the order of the tree."""
    return tuple(
        _option(group, group_type, name, field)
        for group, group_type in get_type_hints(Settings).items()
        if isinstance(group_type, type) and issubclass(group_type, Group)
        for name, field in group_type.model_fields.items()
    )


def option_of(flag: str) -> Option:
    """The option that is set by `flag`: commands without settings have flags of the same meaning."""
    (found,) = (option for option in read_options() if option.flag == flag)
    return found


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """`; did you mean X?` for an unknown name, or nothing: the one name that begins so, else one that is like it. What
    all names begin with makes none of them nearer."""
    full = {_bare(known): known for known in names}
    longer = [known for bare, known in full.items() if bare.startswith(_bare(name) + "-")]
    if len(longer) == 1:
        return f"; did you mean {longer[0]}?"
    found = difflib.get_close_matches(_bare(name)[:_MAX_GUESSED], list(full), n=1, cutoff=likeness)
    return f"; did you mean {full[found[0]]}?" if found else ""


def nearest_flag(name: str, names: Iterable[str]) -> str:
    """The nearest name, as `nearest` finds it, to one that may be another server's and mean something else."""
    return nearest(name, names, _MISSPELT_SHORT if len(_bare(name)) <= _SHORT else _MISSPELT)


def _bare(name: str) -> str:
    return name.lstrip("-").removeprefix(ENV_PREFIX)


def _option(group: str, group_type: type[Group], name: str, field: FieldInfo) -> Option:
    extra = field.json_schema_extra
    commands = extra.get("commands", []) if isinstance(extra, dict) else []
    annotation = get_type_hints(group_type, include_extras=True)[name]
    names = tuple(str(command) for command in commands) if isinstance(commands, list) else ()
    use = str(extra["use"]) if isinstance(extra, dict) else "common"
    return Option(group, name, annotation, field.default, field.description or "", names, use)


def _members(annotation: Any) -> Iterator[Any]:
    """Parts of a union, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    elif annotation is not type(None):
        yield annotation


def _words(annotation: Any) -> tuple[str, ...]:
    """The words of a type that has nothing else."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    found = (item.words for item in get_args(annotation)[1:] if isinstance(item, BranchWords))
    return next(found, ())


def _allowed(annotation: Any) -> Iterator[str]:
    for part in _members(annotation):
        if words := _words(part):
            yield ", ".join(words)
        elif get_origin(part) is Annotated:
            yield from (
                item.description for item in part.__metadata__ if isinstance(item, FieldInfo) and item.description
            )
        elif part is bool:
            yield "true or false"


def _plain_types(annotation: Any) -> Iterator[type]:
    for part in _members(annotation):
        if get_origin(part) is Annotated:
            yield part.__origin__
        elif isinstance(part, type):
            yield part


def _from_text(text: str, kinds: set[type]) -> object:
    """The value a text stands for, or the text itself where it stands for none."""
    if bool in kinds:
        return _BOOLEANS.get(text.lower(), text)
    if int in kinds and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if float in kinds:
        try:
            return text if "_" in text else float(text)
        except ValueError:
            return text
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
