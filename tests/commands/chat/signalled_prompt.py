"""python -m tests.commands.chat.signalled_prompt SIGNAL: a signal between a prompt and its wait for keys."""

import ctypes
import os
import readline
import signal
import sys
from functools import partial

from deltaserve.commands.chat.screen import Screen


def main() -> None:
    """Exits with what the handler of the signal does."""
    number = int(sys.argv[1])
    if number != signal.SIGINT:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # no Python code runs behind the signal, as none does behind readline's own prompt
    readline.set_pre_input_hook(partial(ctypes.PyDLL(None).kill, os.getpid(), number))
    screen = Screen()
    try:
        with screen.unseen_keys():
            screen.read()
    except KeyboardInterrupt:
        sys.exit(128 + number)


if __name__ == "__main__":
    main()
