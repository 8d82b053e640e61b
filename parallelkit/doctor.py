"""`parallelkit doctor`: what was built, what this machine offers, and what follows for its ranks.

Facts first, each from where it is known (an import, a file of the kernel, a call), then what
follows from them, tried where it can be. What is broken ends the command with status 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .group import Group

GIB = 2**30


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    broken: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parallelkit doctor` has no options."""


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 if something in it is broken."""
    broken = False
    sections = {
        "Built": built,
        "Versions": versions,
        "Processors and memory": machine,
        "Shared memory": shared_memory,
        "GPUs": gpus,
        "What follows": conclusions,
    }
    for title, section in sections.items():
        sys.stdout.write(f"{title}\n")
        for finding in section():
            mark = "BROKEN: " if finding.broken else ""
            sys.stdout.write(f"  {finding.name:16}{mark}{finding.text}\n")
            sys.stdout.flush()  # the last section takes seconds
            broken = broken or finding.broken
    return 1 if broken else 0


def built() -> Iterator[Finding]:
    """The native extensions: whether they are there, and whether they load."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        from .ops import cpu
    if cpu is not None:
        yield Finding("CPU extension", f"loaded, kernels for {cpu.kernels()}")
    elif importlib.util.find_spec("parallelkit._cpu") is not None:
        reason = said[0].message if said else "parallelkit.ops warned at its import"
        yield Finding("CPU extension", f"does not load: {reason}", broken=True)
    else:
        yield Finding("CPU extension", "not built: install a C++20 compiler, then parallelkit anew")
    cuda = importlib.util.find_spec("parallelkit._cuda") is not None
    yield Finding("CUDA extension", "built" if cuda else "not built")


def versions() -> Iterator[Finding]:
    """What a bug report needs."""
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    for package in ("parallelkit", "torch", "triton", "matplotlib", "tqdm"):
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "not installed")


def machine() -> Iterator[Finding]:
    """Cores and memory."""
    from .transport.choose import usable_cores

    cores = len(usable_cores())
    yield Finding("cores", f"{os.cpu_count()}, of which this process may use {cores}")
    if (lines := read(Path("/proc/meminfo"))) is not None:
        memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines.splitlines()}
        total, available = memory["MemTotal"] / GIB, memory["MemAvailable"] / GIB
        yield Finding("memory", f"{total:.1f} GiB, {available:.1f} GiB of it available")


def shared_memory() -> Iterator[Finding]:
    """What CPU ranks of one host can share."""
    if not hasattr(os, "memfd_create"):
        yield Finding("memfd", f"none on {platform.system()}")
        return
    try:
        descriptor = os.memfd_create("parallelkit-doctor")
        try:
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as mapping:
                mapping[0] = 1
        finally:
            os.close(descriptor)
        yield Finding("memfd", "works; its pages count as memory, not against /dev/shm")
    except OSError as error:
        yield Finding("memfd", f"cannot be used: {error.strerror}", broken=True)
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        yield Finding("/dev/shm", f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free")
    for name in ("enabled", "shmem_enabled"):
        text = read(Path("/sys/kernel/mm/transparent_hugepage") / name)
        if text is not None and "[" in text:  # the chosen word stands in brackets
            kind = "shared memory" if name == "shmem_enabled" else "other memory"
            yield Finding("huge pages", f"{text[text.index('[') + 1 : text.index(']')]} for {kind}")


def gpus() -> Iterator[Finding]:
    """The GPUs that torch sees, and which reach which."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        built_for = torch.version.cuda
        why = f"torch is built for CUDA {built_for}" if built_for else "torch is built without CUDA"
        yield Finding("none", why)
    for device in range(count):
        facts = torch.cuda.get_device_properties(device)
        reached = [
            str(peer)
            for peer in range(count)
            if peer != device and torch.cuda.can_device_access_peer(device, peer)
        ]
        yield Finding(
            f"cuda:{device}",
            f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / GIB:.0f} GiB; "
            f"reaches {', '.join(reached) or 'no other GPU'} directly",
        )


def conclusions() -> Iterator[Finding]:
    """What ranks started on this machine will do; two CPU ranks are started to see."""
    from .testing import run_ranks
    from .transport.choose import usable_cores

    try:
        transport, mean = run_ranks(weighted_mean, 2)[0]
    except Exception as error:  # whatever it is, it is what the user came to know
        yield Finding("2 CPU ranks", f"do not work: {error}", broken=True)
    else:
        tried = f"tried: the mean of 1 and 5 with weights 1 and 3 is {mean:g}"
        yield Finding("2 CPU ranks", f"will use {transport} ({tried})", broken=mean != 4)
    cores = len(usable_cores())
    yield Finding(
        "more CPU ranks",
        f"up to {cores} have a core each; beyond that they take turns and slow down",
    )


def weighted_mean(group: Group) -> tuple[str, float]:
    """One of two ranks: the transport, and (1·1 + 3·5) / 4."""
    import torch

    from .collectives import weighted_all_reduce_

    tensor = torch.tensor([1.0, 5.0][group.rank])
    weighted_all_reduce_([tensor], [1, 3][group.rank], group)
    return group.transport, tensor.item()


def read(path: Path) -> str | None:
    """The text of one of the kernel's files, None where this system has none."""
    try:
        return path.read_text()
    except OSError:
        return None
