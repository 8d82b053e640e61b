"""How much memory this process may still take, so that what does not fit is refused beforehand.

Memory counts when its pages are first touched: past the limit the kernel ends a process, of its own
choice. What is left is the smallest of what the machine has and what each control group above this
process leaves, in which containers keep their limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes", "check_available"]

# By version of control groups: the files of the limit and of what is in use, and the entry of
# memory.stat with the part of that which the kernel gives up when asked: unused pages of files.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def check_available(wanted: int) -> None:
    """Raise MemoryError where less than `wanted` bytes can be had."""
    available = available_bytes()
    if wanted > available:
        raise MemoryError(f"wanted {wanted} bytes, of which {available} are free")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had without swapping, as the kernel estimates it."""
    left = [1 << 62]
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) * 1024)
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_in(groups, path, 2)
        elif "memory" in controllers.split(","):
            left += _left_in(groups / "memory", path, 1)
    return max(0, min(left))


def _left_in(root: Path, path: str, version: int) -> Iterator[int]:
    """What the group at `path` and each group around it leave of their limits.

    In a container the path may be the host's, and its own group be the root: names that are not
    there say nothing.
    """
    limit_file, usage_file, reclaimable = _FILES[version]
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None:
            entries = (line.split() for line in _lines(group / "memory.stat"))
            files = sum(int(value) for name, value in entries if name == reclaimable)
            yield limit - usage + files
        if group == root:
            return


def _number(path: Path) -> int | None:
    """The number in a file; None where it is missing or says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
