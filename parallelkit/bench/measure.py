"""Fair timing of several candidates on several ranks, a rank's memory, and on what it was."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from ..errors import UsageError
from ..group import Group
from ..ops import cpu

__all__ = ["Candidate", "environment", "interleaved", "pin", "proportional_bytes"]

Candidate = Callable[[], object]

_BATCH_SECONDS = 2e-3  # a timed batch of calls is at least about this long


def pin(rank: int) -> None:
    """Give this rank a core of its own, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def interleaved(
    group: Group, candidates: dict[str, Candidate], rounds: int, label: str
) -> dict[str, float]:
    """Median seconds of one call of each candidate, the slowest rank's counting in each round.

    The candidates take turns, so that a machine that slows down slows them all alike.

    Args:
        group: the ranks; all time the same candidates in the same order.
        candidates: by name, each one call.
        rounds: turns of each, after one that is not counted.
        label: of the progress bar that rank 0 shows.
    """
    from tqdm import tqdm  # an extra, without which --help still works

    calls = {}
    for name, call in candidates.items():
        group.barrier()
        start = time.perf_counter()
        call()
        once = max(group._gather_objects(time.perf_counter() - start))
        calls[name] = max(1, min(200, round(_BATCH_SECONDS / once)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    tqdm.set_lock(threading.RLock())  # its own would be one of multiprocessing, and leak
    quiet = group.rank != 0 or not sys.stderr.isatty()
    for _ in tqdm(range(rounds), desc=label, leave=False, disable=quiet):
        for name, call in candidates.items():
            group.barrier()
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    of_ranks = group._gather_objects(seconds)
    return {
        name: median(map(max, zip(*(s[name] for s in of_ranks), strict=True)))
        for name in candidates
    }


def proportional_bytes() -> int:
    """Memory of this process: its proportional set size, a page that several map counted in parts.

    Raises:
        UsageError: this kernel does not tell.
    """
    rollup = Path("/proc/self/smaps_rollup")
    for line in rollup.read_text().splitlines() if rollup.exists() else []:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise UsageError(f"bench: the memory of a rank must stand as Pss in {rollup}; it does not")


def environment() -> dict[str, object]:
    """What a number has to be read with: machine, versions, commit."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": cpu.kernels() if cpu is not None else "none",
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit of the sources this runs from, "-dirty" with changes; empty when installed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()
