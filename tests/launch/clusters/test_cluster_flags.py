"""`serve --cluster`: what is refused, and what its flags are without it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from deltaserve.core.branches import CLUSTERS
from deltaserve.core.findings import Level
from deltaserve.launch.clusters.cluster_kinds import cluster_kind, cluster_kinds
from deltaserve.launch.lacking import lacking
from deltaserve.settings.flags.flag_help import About
from deltaserve.settings.flags.merge import load, read_line

MISSING = find_spec("ray") is None


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--disaggregation-mode", "null"), "prefill and decode are workers of their own there"),
        (("--enable-dp-attention", "--dp-size", "2"), "workers that share experts (--dp-size) are all on one machine"),
        (("--kv-events-config", "{}"), "leave --kv-events-config out"),
        (("--disaggregation-bootstrap-port", "65534", "--decode", "2"), "the last worker would have port 65536"),
    ],
)
def test_what_workers_of_a_cluster_have_not_is_refused(name: str, flags: tuple[str, ...], words: str) -> None:
    line = read_line("serve", About(""), ["model", "--cluster", name, *flags], {})
    assert any(words in problem for problem in line.problems), line.problems


def test_an_address_without_a_kind_of_cluster_is_refused() -> None:
    line = read_line("serve", About(""), ["model", "--address", "10.0.0.1:6379"], {})
    assert line.problems == ("--address 10.0.0.1:6379: names a cluster; add --cluster, what kind it is of",)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("--trusted-data-network", "10.0.0.0/24"), "--trusted-data-network 10.0.0.0/24 changes nothing: the workers"),
        (("--transfer-devices", "lo"), "--transfer-devices lo changes nothing: the workers of one `serve` are on this"),
        (
            ("--disaggregation-bootstrap-port", "9000"),
            "--disaggregation-bootstrap-port 9000 changes nothing: the workers",
        ),
    ],
)
def test_what_only_workers_elsewhere_read_is_told_to_change_nothing(flags: tuple[str, ...], note: str) -> None:
    (told,) = read_line("serve", About(""), ["model", *flags], {}).notes
    assert told.startswith(note)
    assert read_line("serve", About(""), ["model", "--cluster", "ray", *flags], {}).notes == ()


def test_a_cluster_needs_a_key_that_all_nodes_have(tmp_path: Path) -> None:
    settings = load("serve", "", [str(tmp_path), "--cluster", "ray"], {}).settings
    assert any(line.startswith("--cluster-key-file: missing") for line in lacking("serve", settings))


@pytest.mark.skipif(not MISSING, reason="Ray is installed here: scripts/test-ray looks at what it does")
def test_a_missing_library_is_named_with_what_installs_it(tmp_path: Path) -> None:
    settings = load("serve", "", [str(tmp_path), "--cluster", "ray", "--cluster-key-file", "key"], {}).settings
    missing = "--cluster ray: Ray is not installed: pip install 'deltaserve[ray]', on every node"
    assert list(lacking("serve", settings)) == [missing]
    (line,) = cluster_kind("ray").checks()
    assert (line.level, line.subject) == (Level.OK, "library")
    assert "pip install 'deltaserve[ray]'" in line.text


def test_a_client_that_is_in_no_cluster_is_refused(tmp_path: Path) -> None:
    settings = load("serve", "", [str(tmp_path), "--cluster", "ray", "--address", "ray://10.0.0.1:10001"], {}).settings
    assert any("`ray job submit` does so" in line for line in cluster_kind("ray").refuse(settings))


def test_each_launcher_has_an_entry() -> None:
    assert [kind.name for kind in cluster_kinds()] == list(CLUSTERS)
