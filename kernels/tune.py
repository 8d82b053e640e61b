"""Opt-in measurement of alternatives, kept on disk.

With PARALLELKIT_TUNE=1 the first call of each shape class times the alternatives on this GPU and
writes the fastest to a file under PARALLELKIT_CACHE (default ~/.cache/parallelkit); later calls and
processes read it. Without it nothing is measured or read: the table of `configs` decides, and a
result cannot depend on what an earlier process found.
"""

import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import triton

WARM_UP, REPEATS = 3, 10


def enabled(device: torch.device) -> bool:
    """Whether to measure on this device: asked for, a GPU, and not capturing a CUDA graph."""
    return (
        os.environ.get("PARALLELKIT_TUNE") == "1"
        and device.type == "cuda"
        and not torch.cuda.is_current_stream_capturing()
    )


def fastest(key: str, candidates: Mapping[str, Callable[[], None]], device: torch.device) -> str:
    """The name of the fastest candidate for a key: as kept on disk, or else timed now.

    Candidates must be safe to run any number of times. One that raises (out of shared memory, say)
    is out of the race.
    """
    path = _file(device)
    kept = _read(path)
    if kept.get(key) not in candidates:
        times = {name: _milliseconds(run, device) for name, run in candidates.items()}
        # Read again: another process may have written meanwhile.
        kept = _read(path) | {key: min(times, key=times.__getitem__)}
        _write(path, kept)
        _read.cache_clear()
    return kept[key]


def bucket(*sizes: int) -> str:
    """The shape class of some sizes: each rounded up to a power of two."""
    return "x".join(str(triton.next_power_of_2(size)) for size in sizes)


def _file(device: torch.device) -> Path:
    folder = Path(os.environ.get("PARALLELKIT_CACHE", "~/.cache/parallelkit")).expanduser()
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return folder / f"tuned-{name}-triton-{triton.__version__}.json"


@functools.cache
def _read(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):  # not there yet, or not ours: measure again
        return {}


def _write(path: Path, kept: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under its name at once and whole, whoever else reads or writes.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(kept, file, indent=1, sort_keys=True)
    os.replace(file.name, path)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """Median time of one run, or infinity if it cannot run."""
    try:
        with torch.cuda.device(device):
            for _ in range(WARM_UP):
                run()
            times: list[float] = []
            for _ in range(REPEATS):
                start, stop = _event(), _event()
                start.record()
                run()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError):
        return float("inf")
    return statistics.median(times)
