"""The list of workers that fronts look at, as a file: written as a whole, and again where that failed."""

import os
from pathlib import Path

from deltaserve.process.children.terminal import Say


class PlacesFile:
    """The file. There is none until somebody is known."""

    def __init__(self, path: Path, tell: Say) -> None:
        self.path = path
        self._tell = tell
        self._written = ""
        self._problem: str | None = None

    def keep(self, lines: str) -> None:
        """Write these lines, unless the file has them. A disk that is full is told of once; call it again."""
        if lines == self._written:
            return
        new = self.path.with_suffix(".new")
        try:
            new.write_text(lines)
            os.replace(new, self.path)  # a front must not see half of it
        except OSError as error:
            problem = f"the list of workers cannot be written: {error.strerror or error}"
            if problem != self._problem:
                self._tell(problem)
            self._problem = problem
            return
        if self._problem is not None:
            self._tell("the list of workers is written again")
        self._written, self._problem = lines, None
