"""What was given for a setting, wherever it came from: a flag, a variable or a key of a file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.settings.flags.foreign import Takes
from deltaserve.settings.flags.options import ENV_PREFIX, Option
from deltaserve.settings.flags.yaml_file import read_yaml

CONFIG_ENV = f"{ENV_PREFIX}CONFIG"


class Source(Enum):
    """Where a setting was given, in the order of precedence: later ones win."""

    FILE = "key"
    VARIABLE = "variable"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Given:
    """A name and what was given with it."""

    source: Source
    name: str
    """Name as our keys are written."""
    place: str
    """What a line about it begins with: `--page-size`, `DELTASERVE_PAGE_SIZE`, `page-size in FILE`."""
    values: tuple[object, ...]
    """Texts of a flag, none of a switch; one text of a variable; one value of a file."""

    @property
    def is_part(self) -> bool:
        """Sets a part of the flag's value, as `--compilation-config.mode 3` does: other parts may follow."""
        return self.source is Source.FLAG and "." in self.place and "." not in self.name

    @property
    def where(self) -> str:
        """The place as a prefix of a message about the value."""
        return self.place if self.source is Source.FLAG else f"{self.place}:"

    @property
    def text(self) -> str:
        """The first value; of a switch of a line, that it is on."""
        if not self.values:
            return "true"
        value = self.values[0]
        return str(value).lower() if isinstance(value, bool) else str(value)

    def require(self, takes: Takes) -> None:
        """Raises ConfigError for a flag with a value too many or too few."""
        if self.source is not Source.FLAG:
            return
        if takes is Takes.NOTHING and self.values:
            raise ConfigError(f"{self.place}: takes no value, leave out {self.text!r}")
        if takes is not Takes.NOTHING and not self.values:
            raise ConfigError(f"{self.place}: expected one argument")

    def value_of(self, option: Option) -> object:
        """The value, checked. Raises ConfigError."""
        self.require(Takes.NOTHING if option.is_switch else Takes.ONE)
        given = self._joined() if option.is_list_of_names else self
        if self.source is Source.FILE:
            return option.check(given.values[0], self.where)
        return option.parse(given.text, self.where)

    def _joined(self) -> "Given":
        """Several texts as the one that stands for them."""
        value = self.values[0]
        texts = value if self.source is Source.FILE and isinstance(value, list) else self.values
        are_texts = all(isinstance(text, str) for text in texts)
        return replace(self, values=(",".join(map(str, texts)),)) if texts and are_texts else self


def of_yaml(path: Path) -> list[Given]:
    """Raises ConfigError for a file that cannot be read."""
    return [Given(Source.FILE, key, f"{key} in {path}", (value,)) for key, value in read_yaml(path).items()]


def of_environment(environ: Mapping[str, str]) -> list[Given]:
    """Every variable that begins as ours do."""
    names = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name != CONFIG_ENV)
    return [Given(Source.VARIABLE, _as_key(name), name, (environ[name],)) for name in names]


def _as_key(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")
