"""A command for the tests of the dispatcher whose arguments have the names of settings."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=int, default=0)
    parser.add_argument("--tp-size", type=int, default=1)


def run(given: argparse.Namespace) -> int:
    """Exit code: the sum."""
    return int(given.model + given.tp_size)
