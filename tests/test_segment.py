"""The memory that ranks share: whose it is, what is refused, and what if there is none."""

import gc
import os
import resource
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import run_ranks
from parallelkit.transport import memory, shared_memory
from parallelkit.transport.mapping import MappingError

pytestmark = pytest.mark.skipif(cpu is None, reason="needs the native extension")

SECRET = bytes(range(32))
BYTES = 10_000


@pytest.fixture(params=["memfd", "folder"])
def made(request, tmp_path):
    """A segment of 2 slabs: its path and descriptor."""
    folder = "" if request.param == "memfd" else str(tmp_path)
    path, descriptor = cpu.Segment.create(folder, SECRET, 2, BYTES)
    yield path, descriptor
    os.close(descriptor)


# -- whose it is ----


def test_the_file_is_its_users_alone_and_has_no_name(made, tmp_path):
    path, descriptor = made
    status = os.fstat(descriptor)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0
    assert os.listdir(tmp_path) == []
    assert not any("parallelkit" in name for name in os.listdir("/dev/shm"))
    with pytest.raises(OSError):  # nor can it be given one
        os.link(path, tmp_path / "name", follow_symlinks=True)


def test_what_was_announced_is_opened(made):
    path, descriptor = made
    other = cpu.Segment.open(path, SECRET, 2, BYTES)
    first = cpu.Segment.map(descriptor, 0, 2, BYTES)
    second = cpu.Segment.map(other, 1, 2, BYTES)
    os.close(other)
    torch.frombuffer(first.slab(1), dtype=torch.uint8).fill_(7)
    assert torch.frombuffer(second.slab(1), dtype=torch.uint8).eq(7).all()


LIES = {
    "another group's secret": lambda fd: (SECRET[::-1], 2, BYTES),
    "another number of ranks": lambda fd: (SECRET, 3, BYTES),
    "another slab size": lambda fd: (SECRET, 2, BYTES + 4096),
    "another name": lambda fd: os.pwrite(fd, b"P", 0) and (SECRET, 2, BYTES),
    "another version": lambda fd: os.pwrite(fd, b"\xff", 16) and (SECRET, 2, BYTES),
    "a slab size in the title": lambda fd: os.pwrite(fd, b"\xff", 24) and (SECRET, 2, BYTES),
    "shorter": lambda fd: os.ftruncate(fd, 4096) or (SECRET, 2, BYTES),
    "longer": lambda fd: os.ftruncate(fd, 1 << 20) or (SECRET, 2, BYTES),
    "readable by others": lambda fd: os.fchmod(fd, 0o644) or (SECRET, 2, BYTES),
    "writable by the group": lambda fd: os.fchmod(fd, 0o620) or (SECRET, 2, BYTES),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_is_not_what_was_announced_is_refused(made, lie):
    path, descriptor = made
    secret, size, slab_bytes = LIES[lie](descriptor)
    with pytest.raises(RuntimeError, match="not the shared memory this group announced"):
        cpu.Segment.open(path, secret, size, slab_bytes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(made):
    path, descriptor = made
    os.fchown(descriptor, 65534, 65534)
    with pytest.raises(RuntimeError, match="not the shared memory this group announced"):
        cpu.Segment.open(path, SECRET, 2, BYTES)


# -- when there is none ----


def refused_then_usable(group, fault):
    """`Group.empty` fails on every rank because of one; the group goes on."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if group.rank == 1 and fault == "ulimit -v":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    if group.rank == 0 and fault == "no free memory":
        memory.available_bytes = lambda: 1 << 20
    with pytest.raises(MappingError) as raised:
        group.empty(50_000_000)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    value = torch.full((1000,), float(group.rank))
    pk.weighted_all_reduce_(value, group=group)
    small = group.empty(100).fill_(group.rank)  # noqa: F841
    return str(raised.value), value[0].item(), small.sum().item()


@pytest.mark.parametrize("fault, culprit", [("ulimit -v", 1), ("no free memory", 0)])
def test_no_room_is_an_error_on_every_rank_and_the_group_stays_usable(fault, culprit):
    for rank, (message, mean, total) in enumerate(run_ranks(refused_then_usable, 3, fault)):
        assert message.startswith("shared memory: ") and f"[rank {culprit} of 3]" in message
        assert (mean, total) == (1.0, 100.0 * rank)


def fall_back(group, fault):
    """A group whose memory one rank cannot reach: what it becomes, its warnings and its mean."""
    group.close()
    if fault == "no such folder":
        os.environ["PARALLELKIT_SHM_DIR"] = "/nowhere/at/all"
    elif fault == "no permission" and group.rank == 1:

        class Refusing:
            def __getattr__(self, name):
                return getattr(cpu, name)

            class Segment:
                create, map = cpu.Segment.create, cpu.Segment.map

                @staticmethod
                def open(path, *announced):
                    raise PermissionError(13, "Permission denied", path)

        shared_memory.cpu = Refusing()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pk.Group() as group:
            value = torch.full((5,), 1.0 + 4 * group.rank)
            total = pk.weighted_all_reduce_(value, 1 + 2 * group.rank, group)
            transport = group.transport
    return transport, [str(w.message) for w in caught], value.tolist(), total.item()


@pytest.mark.parametrize("fault", ["no permission", "no such folder"])
def test_memory_that_cannot_be_reached_means_torch_for_all_and_one_warning(fault):
    found = run_ranks(fall_back, 2, fault)
    assert [transport for transport, _, _, _ in found] == ["process-group"] * 2
    assert [len(told) for _, told, _, _ in found] == [1, 0]
    assert "torch.distributed" in found[0][1][0] and "shared memory: " in found[0][1][0]
    assert all((value, total) == ([4.0] * 5, 4.0) for _, _, value, total in found)


def in_a_small_folder(group):
    """100 MB where there are 64: refused or worked around, and all the room is given back."""
    folder = os.environ["PARALLELKIT_SHM_DIR"]
    free = os.statvfs(folder).f_bfree
    with pytest.raises(MappingError):
        group.empty(25_000_000)
    gc.collect()
    group.barrier()
    assert os.statvfs(folder).f_bfree == free
    value = torch.full((25_000_000,), float(group.rank))
    pk.weighted_all_reduce_(value, group=group)
    assert value.eq(value[0]).all()
    return group.transport, value[0].item()


SMALL_FOLDER = """
import os, sys, warnings
from parallelkit.testing import run_ranks
import test_segment
if __name__ == "__main__":
    folder = os.environ["PARALLELKIT_SHM_DIR"]
    print(run_ranks(test_segment.in_a_small_folder, 4))
    print(os.statvfs(folder).f_bfree == os.statvfs(folder).f_blocks, os.listdir(folder))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_64_mb_folder_neither_kills_nor_keeps_anything(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SMALL_FOLDER)
    folder = tmp_path / "small"
    folder.mkdir()
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none "$0" && exec "$@"']
        + [str(folder), sys.executable, str(script)],
        env=os.environ | {"PARALLELKIT_SHM_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        str([("shared-memory", 1.5)] * 4),
        "True []",
    ]
