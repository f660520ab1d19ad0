"""The entry of every command. Light on purpose: Ctrl-C must find its handler before anything heavy is imported."""

import importlib
import sys
from collections.abc import Callable, Sequence

from deltaserve.process.children.interrupts import clean_up_first, end_silently


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of `deltaserve argv`. Without argv the process is the command's own: its arguments, its signals."""
    if argv is not None:
        return _dispatch(argv, lambda: None)
    end_silently()
    code = _dispatch(sys.argv[1:], clean_up_first)
    end_silently()
    return code


def _dispatch(argv: Sequence[str], before_run: Callable[[], None]) -> int:
    code: int = importlib.import_module("deltaserve.cli.dispatch").dispatch(argv, before_run)
    return code


if __name__ == "__main__":
    sys.exit(main())
