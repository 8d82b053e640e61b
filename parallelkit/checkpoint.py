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
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import checkpoint_files
from .arguments import described
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
    Room,
    check_fit,
    optimizer_tensors,
    room_for,
    settings,
    shapes,
    take_over,
)
from .checkpoint_tensors import LoadPlanner, Parts, Reader, SavePlanner, Stored, model_tensors
from .errors import (
    CollectiveMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    ParallelKitError,
)
from .group import Group, default_group
from .optimizer import ShardedAdamW
from .together import check_alike, together

__all__ = ["CheckpointError", "exists", "load", "save"]

T = TypeVar("T")


class _Held(NamedTuple):
    """What a rank has of a tensor."""

    whole: str  # dtype and shape
    numel: int  # of the whole
    boxes: dict[tuple[int, ...], int]  # elements of each, by where it begins; (): of the whole


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
        optimizer: its state is written in float32, each rank what it owns.
        extra: anything that JSON can hold, such as the number of steps; `load` returns it. That of
            rank 0 is written; the others' is looked at, but need not be the same.
        group: all ranks that hold parts of the model, a Group or one dimension of a DeviceMesh.
            Default: the optimizer's; all ranks without one, and where the model is split.

    Raises:
        InvalidTypeError: a path, model or optimizer that is none, a model whose state has something
            other than tensors, or an `extra` that JSON cannot hold. Nothing was written then, nor
            with the next two; every rank raises.
        InvalidArgumentError: the group's ranks do not hold the whole model.
        CollectiveMismatchError: ranks name different folders, have different tensors by one name,
            or different optimizers.
        CheckpointError: a rank could not write. What was there before stays.
    """
    call = "checkpoint.save"
    group = _group_of(group, model, optimizer)
    tensors: dict[str, Stored] = {}

    def begin() -> tuple[list[str], dict[str, _Held], str]:
        root = _checked(call, path, model, optimizer)
        json.dumps(extra)
        tensors.update(model_tensors(model))
        if optimizer is not None:
            tensors.update(optimizer_tensors(optimizer))
        held = {name: _held(value) for name, value in tensors.items()}
        return [f"path {str(root)!r}", _kind(optimizer)], held, new_version(root)

    begun = together(group, begin, call)
    check_alike(call, [told for told, _, _ in begun])
    _must_fit([held for _, held, _ in begun])
    root, version = Path(path), begun[0][2]
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
        model, optimizer: of the same parameters, in the same order, as those that were saved; split
            over tensor-parallel ranks as before, in another way, or not at all. What a model or no
            optimizer does not ask for is not read.
        group: as for `save`.

    Returns:
        `extra`, as it was given to `save`.

    Raises:
        CheckpointError: nothing there, a file that is missing, cut off or edited, or another
            model's; named. Nothing was loaded then, nor with the next two; every rank raises.
        InvalidTypeError: a path, model or optimizer that is none.
        CollectiveMismatchError: ranks name different checkpoints, or have different optimizers.
    """
    call = "checkpoint.load"
    group = _group_of(group, model, optimizer)

    def begin() -> tuple[Path, dict[str, Any], str]:
        folder, manifest = opened(_checked(call, path, model, optimizer))
        return folder, manifest, _kind(optimizer)

    begun = _together(group, begin)
    check_alike(call, [[f"checkpoint {folder.name}", kind] for folder, _, kind in begun])
    folder, manifest, _ = begun[group.rank]

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


# -- who takes part, and with what -----------------------------------------------------------------


def _group_of(
    group: Group | DeviceMesh | None, model: nn.Module, optimizer: ShardedAdamW | None
) -> Group:
    """The ranks; of bad arguments those that good ones most likely have.

    Where the optimizer is every rank's, that is the default group and not the optimizer's own: a
    rank whose optimizer is none can find the others there.
    """
    if group is not None or not isinstance(optimizer, ShardedAdamW):
        return default_group(group)
    if dist.is_initialized() and optimizer.group.size == dist.get_world_size():
        return default_group(None)
    if not isinstance(model, nn.Module):
        return optimizer.group
    size = optimizer.group.size
    beyond = any(  # other ranks than the optimizer's hold other parts
        hasattr(p, "tp_split") or (isinstance(p, DTensor) and p.device_mesh.size() > size)
        for p in model.parameters()
    )
    return default_group(None) if beyond else optimizer.group


def _checked(call: str, path: object, model: object, optimizer: object) -> Path:
    """The folder, once all of them are what they should be."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidTypeError(
            f"{call}: path must be a str or os.PathLike, got {type(path).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"{call}: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if optimizer is not None and not isinstance(optimizer, ShardedAdamW):
        raise InvalidTypeError(
            f"{call}: optimizer must be a parallelkit.ShardedAdamW or None, got "
            f"{type(optimizer).__name__}; another's state_dict() goes through torch.save"
        )
    return Path(path)


def _kind(optimizer: ShardedAdamW | None) -> str:
    return "no optimizer" if optimizer is None else f"an optimizer of {shapes(optimizer)}"


def _held(value: Stored) -> _Held:
    if not isinstance(value, Parts):
        return _Held(described(value), value.numel(), {(): value.numel()})
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    boxes = {tuple(offset): box.numel() for offset, box in value.boxes.items()}
    return _Held(described(whole), value.numel, boxes)


def _must_fit(told: list[dict[str, _Held]]) -> None:
    """Refuse tensors that ranks know by one name and are not one, or not whole on all together."""
    for name in dict.fromkeys(name for held in told for name in held):
        having = {rank: held[name] for rank, held in enumerate(told) if name in held}
        first = min(having)
        boxes: dict[tuple[int, ...], int] = {}
        for rank, held in having.items():
            if held.whole != having[first].whole:
                raise CollectiveMismatchError(
                    f"checkpoint.save: {name} is {having[first].whole} on rank {first} and "
                    f"{held.whole} on rank {rank}; save different models under different paths. "
                    "Nothing was written"
                )
            boxes.update(held.boxes)
        if having[first].numel not in (boxes.get(()), sum(boxes.values())):
            raise InvalidArgumentError(
                f"checkpoint.save: the {len(told)} ranks of the group hold {sum(boxes.values())} "
                f"of the {having[first].numel} elements of {name}; the group must be of all ranks "
                "that hold parts of the model. Nothing was written"
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
