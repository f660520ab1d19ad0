"""The list of workers is written where that is possible, and told of where it is not."""

from pathlib import Path

from deltaserve.launch.clusters.places_file import PlacesFile


def test_a_list_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    told: list[object] = []
    file = PlacesFile(tmp_path / "workers", told.append)
    file.keep("")
    assert not file.path.exists(), "nobody is known yet"
    file.path.with_suffix(".new").symlink_to("/dev/full")
    for _ in range(3):
        file.keep("a=prefill@h:1\n")
    assert told == ["the list of workers cannot be written: No space left on device"]
    assert not file.path.exists()
    file.path.with_suffix(".new").unlink()
    file.keep("a=prefill@h:1\n")
    assert file.path.read_text() == "a=prefill@h:1\n"
    assert told[1:] == ["the list of workers is written again"]


def test_a_list_is_replaced_where_it_changed_only(tmp_path: Path) -> None:
    file = PlacesFile(tmp_path / "workers", print)
    file.keep("a=prefill@h:1\n")
    first = file.path.stat().st_ino
    file.keep("a=prefill@h:1\n")
    assert file.path.stat().st_ino == first
    file.keep("")
    assert file.path.read_text() == ""
