"""Who may reach a secret besides its owner."""

import os
import stat
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.private_file import check_owner_alone

USER, ROOT = 1000, 0


def status(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 2000, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "path"),
    [
        (0o600, USER, "/home/me/key"),
        (0o400, ROOT, "/etc/key"),
        (0o640, ROOT, "/etc/deltaserve/key"),  # root:deltaserve, of a service
        (0o440, ROOT, "/var/keys/..data/key"),  # Kubernetes with fsGroup
        (0o444, ROOT, "/run/secrets/key"),  # Docker, Podman
    ],
)
def test_what_is_private_enough(mode: int, owner: int, path: str) -> None:
    check_owner_alone(status(mode, owner), Path(path), "KEY")


@pytest.mark.parametrize(
    ("mode", "owner", "path"),
    [
        (0o640, USER, "/home/me/key"),
        (0o444, USER, "/run/secrets/key"),
        (0o444, ROOT, "/etc/key"),
        (0o444, ROOT, "/run/secrets.d/key"),
        (0o660, ROOT, "/etc/key"),
        (0o610, ROOT, "/etc/key"),
        (0o446, ROOT, "/run/secrets/key"),
        (0o604, ROOT, "/etc/key"),
    ],
)
def test_what_others_can_reach(mode: int, owner: int, path: str) -> None:
    with pytest.raises(ConfigError, match=f"KEY: mode {mode:04o}, others can reach it; at most 0600 is allowed"):
        check_owner_alone(status(mode, owner), Path(path), "KEY")
