"""Limits of containers and services, as the kernel shows them."""

import os
from pathlib import Path

import pytest

from deltaserve.launch.cgroup import CgroupLimits, read_limits, usable_cores

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    mount = write(
        tmp_path,
        {
            "proc": "0::/\n",
            "cpu.max": "150000 100000\n",
            "memory.max": f"{8 * GIB}\n",
            "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
        },
    )
    assert read_limits(mount / "proc", mount) == CgroupLimits(1.5, 8 * GIB, 7 * GIB)


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    mount = write(
        tmp_path,
        {
            "proc": "0::/system.slice/deltaserve.service\n",
            "system.slice/cpu.max": "400000 100000\n",
            "system.slice/memory.max": "max\n",
            "system.slice/memory.current": "5\n",
            "system.slice/deltaserve.service/cpu.max": "max 100000\n",
            "system.slice/deltaserve.service/memory.max": f"{GIB}\n",
            "system.slice/deltaserve.service/memory.current": f"{2 * GIB}\n",
        },
    )
    assert read_limits(mount / "proc", mount) == CgroupLimits(4.0, GIB, 0)


def test_the_first_version_has_a_tree_per_controller(tmp_path: Path) -> None:
    mount = write(
        tmp_path,
        {
            "proc": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/docker/1/cpu.cfs_quota_us": "200000",
            "cpu/docker/1/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "0",
            "memory/docker/1/memory.limit_in_bytes": str(GIB),
            "memory/docker/1/memory.usage_in_bytes": "4096",
            "memory/docker/1/memory.stat": "cache 4096\ntotal_inactive_file 0\n",
        },
    )
    assert read_limits(mount / "proc", mount) == CgroupLimits(2.0, GIB, GIB - 4096)


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "absent", tmp_path) == CgroupLimits()
    assert read_limits(write(tmp_path, {"proc": "nonsense\n0::/../x\n"}) / "proc", tmp_path) == CgroupLimits()


@pytest.mark.parametrize("cores", [0.2, 1.0, 1.9])
def test_part_of_a_core_is_no_second_one(cores: float) -> None:
    assert usable_cores(CgroupLimits(cores=cores)) == 1


def test_without_a_limit_there_are_the_cores_it_may_run_on() -> None:
    assert usable_cores(CgroupLimits()) == len(os.sched_getaffinity(0))
