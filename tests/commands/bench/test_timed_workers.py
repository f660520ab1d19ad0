"""What benchmarks/timed_workers.py times is there: it is named by strings."""

from benchmarks.timed_workers import SITES


def test_every_timed_function_is_there() -> None:
    assert [
        (owner, name) for sites in SITES.values() for owner, name in sites if not callable(getattr(owner, name))
    ] == []
