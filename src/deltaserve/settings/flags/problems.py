"""Several things that are wrong, told together: whoever mends a long line should not learn of them one by one."""

from collections.abc import Sequence

from deltaserve.core.errors import ConfigError


class ConfigProblems(ConfigError):
    """More than one problem in one error."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(" | ".join(problems))
        self.problems = tuple(problems)


def problems_of(error: ConfigError) -> tuple[str, ...]:
    """The problems of an error, each by itself."""
    return error.problems if isinstance(error, ConfigProblems) else (str(error),)


def raise_problems(problems: Sequence[str]) -> None:
    """Raises ConfigError if there are any, each told once."""
    found = list(dict.fromkeys(problems))
    if len(found) > 1:
        raise ConfigProblems(found)
    if found:
        raise ConfigError(found[0])
