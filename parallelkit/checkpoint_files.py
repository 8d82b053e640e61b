"""The folder of a checkpoint: versions, of which one counts, and files that are what was written.

path/current                     which version counts, and the hash of its manifest
path/version-.../manifest.json   sizes and hashes of the files, and what is no tensor
path/version-.../*.distcp, .metadata   torch.distributed.checkpoint's own
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .errors import ParallelKitError

__all__ = [
    "CheckpointError",
    "Facts",
    "check_file",
    "exists",
    "facts_of",
    "new_version",
    "opened",
    "publish",
]

Facts = tuple[int, str]  # of a file: size in bytes, SHA-256

_FORMAT = 3
_HASHED_AT_ONCE = 1 << 22


class CheckpointError(ParallelKitError, RuntimeError):
    """A checkpoint that is missing, damaged, of another model, or could not be written."""


def new_version(root: Path) -> str:
    """A name for a version that is about to be written, in a folder that is there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{root}: the folder cannot be made: {type(error).__name__}: {error}; "
            "nothing was written"
        ) from error
    return f"version-{uuid.uuid4().hex}"


def publish(root: Path, version: str, content: dict[str, Any]) -> None:
    """Make a version, whose files are complete, the one that counts, and remove all others.

    Whatever happens on the way, `current` names a whole version.
    """
    text = json.dumps({"format": _FORMAT, **content}, indent=1).encode()
    current = {"version": version, "sha256": hashlib.sha256(text).hexdigest()}
    _remove(root, but=(version, _named(root / "current")))
    _write(root / "current.new", json.dumps(current).encode())  # first: see `exists`
    _write(root / version / "manifest.json", text)
    os.replace(root / "current.new", root / "current")
    _sync(root)
    _remove(root, but=(version,))


def exists(root: Path) -> bool:
    """Whether a version counts; CheckpointError where none does though there are whole ones."""
    if (root / "current").exists():
        return True
    whole = sorted(manifest.parent.name for manifest in root.glob("version-*/manifest.json"))
    if whole and whole != [_named(root / "current.new")]:  # which a killed first save left
        raise CheckpointError(
            f"{root}: the file current is missing, which says what counts, but there is "
            f"{' and '.join(whole)}; bring it back from a copy, or move them away to start afresh"
        )
    return False


def _named(file: Path) -> str | None:
    """The version that `current` names, or that a save was about to make it name, if any."""
    try:
        return str(json.loads(file.read_bytes())["version"])
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _remove(root: Path, but: Collection[str | None]) -> None:
    """All versions but these."""
    for version in root.glob("version-*"):
        if version.name not in but:
            shutil.rmtree(version, ignore_errors=True)


def opened(root: Path) -> tuple[Path, dict[str, Any]]:
    """The version that counts, and its manifest."""
    if not exists(root):
        raise CheckpointError(f"{root}: there is no checkpoint; nothing was loaded")
    try:
        current = json.loads((root / "current").read_bytes())
        folder = root / current["version"]
        text = (folder / "manifest.json").read_bytes()
        announced = current["sha256"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{root / 'current'} is damaged: {error}; nothing was loaded"
        ) from error
    if hashlib.sha256(text).hexdigest() != announced:
        raise CheckpointError(
            f"{folder / 'manifest.json'} is not what {root / 'current'} announces; "
            "nothing was loaded"
        )
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{folder}: format {manifest['format']}, wanted {_FORMAT}; nothing was loaded"
        )
    return folder, manifest


def facts_of(file: Path) -> Facts:
    """Size and hash of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while part := stream.read(_HASHED_AT_ONCE):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def check_file(file: Path, size: int, digest: str) -> None:
    """CheckpointError where a file is not what was written."""
    if not file.exists():
        raise CheckpointError(f"{file} is missing; nothing was loaded")
    found = facts_of(file)
    if found != (size, digest):
        how = f"has {found[0]} bytes instead of {size}" if found[0] != size else "was changed"
        raise CheckpointError(f"{file} {how} since it was saved; nothing was loaded")


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(file.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
