"""Two commands for the tests of the dispatcher: one with settings, one with arguments of its own."""

import argparse

from deltaserve.core.errors import ConfigError
from deltaserve.settings.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--label")


def run(given: Settings | argparse.Namespace) -> int:
    """Exit code: the page size, or the count."""
    if isinstance(given, argparse.Namespace):
        assert given.label is None
        return int(given.count)
    if given.memory.page_size == 128:
        raise ConfigError("the model folder\nhas no config.json")
    return int(given.memory.page_size)


def rehearse(settings: Settings) -> dict[str, str]:
    if settings.memory.page_size == 128:
        raise ConfigError("the model folder\nhas no config.json")
    return {"num_pages": "7"}
