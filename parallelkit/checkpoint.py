"""Checkpoints of a model and its sharded optimizer: each rank writes its part, any number reads.

A save writes a new version beside the old one and then replaces `current` atomically, so that a
crash at any moment leaves the one before whole. A load checks every file before it changes
anything, and unpickles only the classes of which torch.distributed.checkpoint's metadata consists.

checkpoint_files      the folder: versions, hashes, what counts
checkpoint_ranks      who takes part, and how they fail together
checkpoint_tensors    what of each tensor a rank writes and reads
checkpoint_optimizer  the optimizer's part
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.device_mesh import DeviceMesh

from . import checkpoint_files
from .checkpoint_files import (
    CheckpointError,
    Facts,
    check_file,
    facts_of,
    new_version,
    opened,
    publish,
)
from .checkpoint_optimizer import (
    Names,
    Room,
    check_fit,
    in_words,
    names_of,
    optimizer_tensors,
    room_for,
    settings,
    take_over,
)
from .checkpoint_ranks import (
    Held,
    by_torch,
    check_arguments,
    check_whole,
    group_of,
    held,
    share_of,
    together_at,
)
from .checkpoint_tensors import (
    LoadPlanner,
    Reader,
    SavePlanner,
    Stored,
    model_tensors,
    state_of,
    unasked,
)
from .errors import ParallelKitError
from .group import Group
from .optimizer import ShardedAdamW
from .together import check_alike, together

__all__ = ["CheckpointError", "exists", "load", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedAdamW | None = None,
    *,
    extra: Any = None,
    group: Group | DeviceMesh | None = None,
) -> None:
    """Write model and optimizer to a folder that all ranks see. Collective, atomic.

    Args:
        path: the folder; what it holds is replaced once the new checkpoint is complete.
        model: wrapped or not, fully sharded or not; where `pk.tensor_parallel` has split it, the
            unsplit model is written. Ranks may have different parts of it, by different names; what
            several have by one name is the same on them, and one of them writes it.
        optimizer: its state is written in float32, each rank what it owns, by the names that the
            parameters have in the model.
        extra: anything that JSON can hold, such as the number of steps; `load` returns it. That of
            rank 0 is written; the others' is looked at, but need not be the same.
        group: all ranks that hold parts of the model, a Group or one dimension of a DeviceMesh.
            Default: the optimizer's; all ranks without one, and where the model is split.

    Raises:
        InvalidTypeError: a path, model or optimizer that is none, a model whose state has something
            other than tensors, or an `extra` that JSON cannot hold. Nothing was written then, nor
            with the next two; every rank raises.
        InvalidArgumentError: the group's ranks do not hold the whole model, the optimizer has a
            parameter that is not in the model, or the model is on the meta device.
        CollectiveMismatchError: ranks name different folders, have different tensors by one name,
            or different optimizers.
        CheckpointError: a rank could not write. What was there before stays.
    """
    call = "checkpoint.save"
    group = group_of(group, model, optimizer)
    tensors: dict[str, Stored] = {}
    content: dict[str, Any] = {"extra": extra}

    def begin() -> tuple[list[str], dict[str, Held], str]:
        root = check_arguments(call, path, model, optimizer)
        state = state_of(model)
        names = names_of(optimizer, state)
        tensors.update(model_tensors(state) | optimizer_tensors(optimizer, names))
        content.update(settings(optimizer, names))
        json.dumps(content)
        words = [f"path {str(root)!r}", *in_words(optimizer, names)]
        return words, {name: held(value) for name, value in tensors.items()}, new_version(root)

    begun = together(group, begin, call)
    check_alike(call, [words for words, _, _ in begun])
    check_whole([parts for _, parts, _ in begun])
    _write(group, Path(path), begun[0][2], tensors, content)


def _write(
    group: Group, root: Path, version: str, tensors: dict[str, Stored], content: dict[str, Any]
) -> None:
    """Write a version and make it the one that counts."""
    folder = root / version

    def write() -> None:
        writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        by_torch(group, save_tensors, tensors, storage_writer=writer, planner=SavePlanner())

    def look_up() -> dict[str, Facts]:
        return {p.name: facts_of(p) for p in share_of(group, sorted(folder.iterdir()))}

    def make_current() -> None:
        if group.rank == 0:
            files = {name: facts for part in written for name, facts in part.items()}
            publish(root, version, {"files": files, **content})

    try:
        together_at(group, root, write)
        written = together_at(group, root, look_up)
    except ParallelKitError:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    together_at(group, root, make_current)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint to load. Not collective.

    Raises:
        CheckpointError: there is one, but the file that says so is gone: no reason to start afresh.
    """
    return checkpoint_files.exists(Path(path))


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedAdamW | None = None,
    *,
    group: Group | DeviceMesh | None = None,
) -> Any:
    """Read what `save` wrote into model and optimizer, at any number of ranks. Collective.

    Args:
        path: the folder.
        model: of the same tensors, by name, as the one that was saved; split over tensor-parallel
            ranks as before, in another way, or not at all. The group's ranks may have different
            parts of it; together they have all that was saved.
        optimizer: of the same parameters in the same groups, in any order within a group. Without
            one its part of the checkpoint is not read.
        group: as for `save`.

    Returns:
        `extra`, as it was given to `save`.

    Raises:
        CheckpointError: nothing there, a file that is missing, cut off or edited, or another
            model's or optimizer's; named. Nothing was loaded then, nor with the next three; every
            rank raises.
        InvalidTypeError: a path, model or optimizer that is none.
        InvalidArgumentError: the model is on the meta device, or the optimizer has a parameter
            that is not in the model.
        CollectiveMismatchError: ranks name different checkpoints, or have different optimizers.
    """
    call = "checkpoint.load"
    group = group_of(group, model, optimizer)
    if isinstance(optimizer, ShardedAdamW):
        optimizer.place_new()  # first: parameters get other memory by it
    tensors: dict[str, Stored] = {}
    names: Names = {}

    def begin() -> tuple[Path, dict[str, Any], list[str]]:
        folder, manifest = opened(check_arguments(call, path, model, optimizer))
        state = state_of(model)
        tensors.update(model_tensors(state))
        names.update(names_of(optimizer, state))
        return folder, manifest, in_words(optimizer, names)

    begun = together_at(group, path, begin)
    check_alike(call, [[f"checkpoint {folder.name}", *words] for folder, _, words in begun])
    folder, manifest, _ = begun[group.rank]

    def check_files() -> None:
        for name in share_of(group, sorted(manifest["files"])):
            check_file(folder / name, *manifest["files"][name])

    together_at(group, folder, check_files)
    _read(group, folder, manifest, tensors, optimizer, names)
    return manifest["extra"]


def _read(
    group: Group,
    folder: Path,
    manifest: dict[str, Any],
    tensors: dict[str, Stored],
    optimizer: ShardedAdamW | None,
    names: Names,
) -> None:
    """Read a version into the model's tensors and the optimizer, once all of it is known to fit."""
    reader = Reader(folder)
    room: Room = {}
    everybodys = together_at(group, folder, lambda: unasked(folder, reader, tensors))
    if left := set.intersection(*everybodys):
        raise CheckpointError(
            f"{folder}: the model must have all that was saved, but it has no {min(left)}; "
            "nothing was loaded"
        )

    def make_room() -> None:
        if optimizer is not None:
            check_fit(folder, optimizer, names, manifest)
            found, entries = room_for(optimizer, names, manifest)
            room.update(found)
            tensors.update(entries)

    def read() -> None:
        by_torch(group, load_tensors, tensors, storage_reader=reader, planner=LoadPlanner())

    def finish() -> None:
        if optimizer is not None:
            take_over(optimizer, names, manifest, room)

    for work in (make_room, read, finish):
        together_at(group, folder, work)
