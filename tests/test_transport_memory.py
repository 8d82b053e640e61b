"""What memory this process may still take, as the machine and its control groups tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelkit.transport.memory import available_bytes

MIB = 1 << 20
UNLIMITED = {1: str((1 << 63) - 4096), 2: "max"}


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def control_group(folder: Path, version: int, limit: str, used: int, files: int = 0) -> None:
    """A control group's folder, as the kernel of this version of them shows it."""
    stat = f"anon 7\ninactive_file {files}\nunevictable 0"
    if version == 1:
        stat += f"\ntotal_inactive_file {files}"
        write(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=str(used))
    else:
        write(folder, memory__max=limit, memory__current=str(used))
    write(folder, memory__stat=stat)


@pytest.fixture(params=[1, 2])
def machine(request, tmp_path):
    """A machine with 1000 MiB free, whose control groups are of one version."""
    version = request.param
    line = "4:cpu,memory:/jobs/mine" if version == 1 else "0::/jobs/mine"
    write(tmp_path / "proc", meminfo=f"MemTotal: 1 kB\nMemAvailable:   {1000 * 1024} kB")
    write(tmp_path / "proc" / "self", cgroup=f"9:name=systemd:/other\n{line}")
    groups = tmp_path / "groups"
    return tmp_path, version, groups / "memory" if version == 1 else groups


def left(root: Path) -> float:
    return available_bytes(root / "proc", root / "groups") / MIB


def test_without_limits_it_is_what_the_machine_has(machine):
    root, version, groups = machine
    assert left(root) == 1000, "no control groups are mounted"
    control_group(groups / "jobs" / "mine", version, UNLIMITED[version], 900 * MIB)
    assert left(root) == 1000


def test_a_limit_counts_less_what_is_in_use_and_cannot_be_dropped(machine):
    root, version, groups = machine
    control_group(groups / "jobs" / "mine", version, str(500 * MIB), 300 * MIB)
    assert left(root) == 200
    control_group(groups / "jobs" / "mine", version, str(500 * MIB), 300 * MIB, files=100 * MIB)
    assert left(root) == 300
    control_group(groups / "jobs" / "mine", version, str(5000 * MIB), 300 * MIB)
    assert left(root) == 1000, "the machine has less"
    control_group(groups / "jobs" / "mine", version, str(500 * MIB), 501 * MIB)
    assert left(root) == 0


def test_the_limit_of_an_outer_group_counts_too(machine):
    root, version, groups = machine
    control_group(groups / "jobs" / "mine", version, UNLIMITED[version], 10 * MIB)
    control_group(groups / "jobs", version, str(80 * MIB), 20 * MIB)
    assert left(root) == 60
    control_group(groups, version, str(50 * MIB), 20 * MIB)
    assert left(root) == 30


def test_in_a_container_the_root_is_its_own_group(machine):
    """The path may be the host's, of which nothing is mounted there."""
    root, version, groups = machine
    control_group(groups, version, str(40 * MIB), 15 * MIB)
    assert left(root) == 25


def test_on_a_machine_that_tells_nothing_there_is_no_limit(tmp_path):
    assert available_bytes(tmp_path, tmp_path) == 1 << 62
