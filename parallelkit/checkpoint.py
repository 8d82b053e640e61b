"""Checkpoints of a model and its sharded optimizer: each rank writes its part, any number reads.

A save writes a new version beside the old one and then replaces `current` atomically, so that a
crash at any moment leaves the one before whole. A load checks every file before it changes
anything, and unpickles only the classes of which torch.distributed.checkpoint's metadata consists.

checkpoint_files      the folder: versions, hashes, what counts
checkpoint_tensors    what of each tensor a rank writes and reads
checkpoint_optimizer  the optimizer's part
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from .checkpoint_files import (
    CheckpointError,
    Facts,
    check_file,
    facts_of,
    new_version,
    opened,
    publish,
)
from .checkpoint_optimizer import Room, check_fit, optimizer_tensors, room_for, settings, take_over
from .checkpoint_tensors import LoadPlanner, Parts, Reader, SavePlanner, Stored, model_tensors
from .errors import InvalidArgumentError, ParallelKitError
from .group import Group, default_group
from .optimizer import ShardedAdamW
from .together import check_alike, together

__all__ = ["CheckpointError", "exists", "load", "save"]

T = TypeVar("T")
Held = dict[tuple[int, ...], int]  # of a tensor: elements of each box, by where that begins


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedAdamW | None = None,
    *,
    extra: Any = None,
    group: Group | None = None,
) -> None:
    """Write model and optimizer to a folder that all ranks see. Collective, atomic.

    Args:
        path: the folder; what it holds is replaced once the new checkpoint is complete.
        model: wrapped or not, fully sharded or not; where `pk.tensor_parallel` has split it, the
            unsplit model is written.
        optimizer: its state is written in float32, each rank what it owns.
        extra: anything that JSON can hold, such as the number of steps; `load` returns it.
        group: all ranks that hold parts of the model. Default: the optimizer's; all ranks without
            one, and where the model is split.

    Raises:
        InvalidTypeError: the model's state has something other than tensors, or `extra` something
            that JSON cannot hold.
        InvalidArgumentError: the group's ranks do not hold the whole model. Nothing was written.
        CollectiveMismatchError: ranks name different folders. Nothing was written.
        CheckpointError: a rank could not write. What was there before stays.
    """
    group = _group_of(group, model, optimizer)
    tensors: dict[str, Stored] = {}

    parts: dict[str, Parts] = {}

    def begin() -> tuple[str, str, dict[str, Held]]:
        folder = os.fspath(path)
        json.dumps(extra)
        tensors.update(model_tensors(model))
        if optimizer is not None:
            tensors.update(optimizer_tensors(optimizer))
        parts.update({k: v for k, v in tensors.items() if isinstance(v, Parts)})
        held = {name: _held(value) for name, value in parts.items()}
        return folder, new_version(Path(folder)), held

    begun = together(group, begin, "checkpoint.save")
    check_alike("checkpoint.save", [[f"path {folder!r}"] for folder, _, _ in begun])
    root, version = Path(begun[0][0]), begun[0][1]
    _must_cover(parts, [held for _, _, held in begun])
    folder = root / version

    def write() -> dict[str, Facts]:
        writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        with _torchs_checkpoint():
            save_tensors(tensors, storage_writer=writer, planner=SavePlanner(), **_ranks_of(group))
        return {p.name: facts_of(p) for p in _share(group, sorted(folder.iterdir()))}

    def make_current() -> None:
        if group.rank == 0:
            files = {name: facts for part in written for name, facts in part.items()}
            publish(root, version, {"files": files, "extra": extra, **settings(optimizer)})

    try:
        written = _together(group, write)
    except ParallelKitError:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    _together(group, make_current)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint to load. Not collective."""
    return (Path(path) / "current").exists()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedAdamW | None = None,
    *,
    group: Group | None = None,
) -> Any:
    """Read what `save` wrote into model and optimizer, at any number of ranks. Collective.

    Args:
        path: the folder.
        model, optimizer: of the same parameters, in the same order, as those that were saved; split
            over tensor-parallel ranks as before, in another way, or not at all.
        group: as for `save`.

    Returns:
        `extra`, as it was given to `save`.

    Raises:
        CheckpointError: nothing there, a file that is missing, cut off or edited, or another
            model's; named. Nothing was loaded.
    """
    group = _group_of(group, model, optimizer)
    folder, manifest = _together(group, lambda: opened(Path(path)))[group.rank]

    def check() -> None:
        for name in _share(group, sorted(manifest["files"])):
            check_file(folder / name, *manifest["files"][name])

    _together(group, check)
    reader = Reader(folder)
    tensors: dict[str, Stored] = {}
    room: Room = {}

    def fits() -> None:
        tensors.update(model_tensors(model))
        if optimizer is not None:
            check_fit(folder, optimizer, manifest)
            found, entries = room_for(optimizer, manifest)
            room.update(found)
            tensors.update(entries)
        saved = reader.read_metadata().state_dict_metadata
        for name, value in tensors.items():
            stored = saved.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{folder}: it has no {name}; nothing was loaded")
            if stored.size != value.shape:
                raise CheckpointError(
                    f"{folder}: {name} must have shape {list(value.shape)}, "
                    f"got {list(stored.size)}; nothing was loaded"
                )

    _together(group, fits)

    def read() -> None:
        with torch.no_grad(), _torchs_checkpoint():
            load_tensors(tensors, storage_reader=reader, planner=LoadPlanner(), **_ranks_of(group))
        if optimizer is not None:
            take_over(optimizer, manifest, room)

    _together(group, read)
    return manifest["extra"]


# -- who takes part --------------------------------------------------------------------------------


def _group_of(group: Group | None, model: nn.Module, optimizer: ShardedAdamW | None) -> Group:
    if group is not None:
        return group
    if optimizer is None:
        return default_group(None)
    size = optimizer.group.size
    beyond = any(  # other ranks than the optimizer's hold other parts
        hasattr(p, "tp_split") or (isinstance(p, DTensor) and p.device_mesh.size() > size)
        for p in model.parameters()
    )
    return default_group(None) if beyond else optimizer.group


def _held(parts: Parts) -> Held:
    """Elements of the boxes that this rank holds, by where those begin."""
    return {tuple(offset): box.numel() for offset, box in parts.boxes.items()}


def _must_cover(tensors: dict[str, Parts], told: list[dict[str, Held]]) -> None:
    """Refuse, on every rank alike, tensors that the ranks together do not have the whole of."""
    for name, parts in tensors.items():
        boxes: Held = {}
        for held in told:
            boxes.update(held.get(name, {}))
        if sum(boxes.values()) != parts.numel:
            raise InvalidArgumentError(
                f"checkpoint.save: the {len(told)} ranks of the group hold {sum(boxes.values())} "
                f"of the {parts.numel} elements of {name}; the group must be of all ranks that "
                "hold parts of the model. Nothing was written"
            )


def _together(group: Group, work: Callable[[], T]) -> list[T]:
    return together(group, work, "checkpoint", CheckpointError)


def _share(group: Group, files: list[Any]) -> list[Any]:
    """The files that this rank has to hash."""
    return files[group.rank :: group.size]


def _ranks_of(group: Group) -> dict[str, Any]:
    if group._process_group is None:
        if group.size > 1:
            raise InvalidArgumentError("checkpoint: the ranks must be processes of their own")
        return {"no_dist": True}
    return {"process_group": group._process_group}


@contextlib.contextmanager
def _torchs_checkpoint() -> Iterator[None]:
    """Its exception as an ordinary one, and no warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # no Exception
            raise CheckpointError(f"checkpoint: {error}") from error
