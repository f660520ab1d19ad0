"""What often lies where a large file should: it was never downloaded."""

_STAND_INS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file: `git lfs pull` gets it",
    b"<!doctype html": "an HTML page, not the file: download it again",
    b"<html": "an HTML page, not the file: download it again",
}
HEAD_BYTES = 64


def stand_in(head: bytes) -> str | None:
    """What a file is that begins with `head`, at least HEAD_BYTES of it; None when it may be what its name says."""
    begins = head[:HEAD_BYTES].lstrip().lower()
    return next((text for start, text in _STAND_INS.items() if begins.startswith(start)), None)
