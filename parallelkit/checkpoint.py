"""Checkpoints of a model and its sharded optimizer: each rank writes its part, any number reads.

    path/current                     which version counts, and the hash of its manifest
    path/version-.../manifest.json   sizes and hashes of the files, hyper-parameters, step counts
    path/version-.../*.distcp, .metadata   torch.distributed.checkpoint's own

A save writes a new version beside the old one and then replaces `current` atomically, so that a
crash at any moment leaves the one before whole. A load checks every file before it changes
anything, and unpickles only the classes of which torch.distributed.checkpoint's metadata consists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from .adamw import decode
from .errors import InvalidTypeError, ParallelKitError
from .group import Group, default_group
from .optimizer import ShardedAdamW
from .optimizer_layout import Member
from .optimizer_state import ENTRIES

__all__ = ["CheckpointError", "load", "save"]

_FORMAT = 1
_HASHED_AT_ONCE = 1 << 22

T = TypeVar("T")


class CheckpointError(ParallelKitError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another model. Nothing was loaded."""


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
        model: equal on all ranks; wrapped or not.
        optimizer: its state is written in float32, each rank what it owns.
        extra: anything that JSON can hold, such as the number of steps; `load` returns it.
        group: default: the optimizer's, or all ranks.

    Raises:
        InvalidTypeError: the model's state has something other than tensors.
        CheckpointError: a rank could not write. What was there before stays.
    """
    group = group or (optimizer.group if optimizer else default_group(None))
    root = Path(path)

    tensors: dict[str, torch.Tensor | _Piece] = {}

    def begin() -> str:
        root.mkdir(parents=True, exist_ok=True)
        tensors.update({**_model_tensors(model), **_optimizer_pieces(optimizer)})
        return f"version-{uuid.uuid4().hex}"

    version = _together(group, begin)[0]
    folder = root / version

    def write() -> dict[str, tuple[int, str]]:
        writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _quiet():
            save_tensors(tensors, storage_writer=writer, planner=planner, **_ranks_of(group))
        return {p.name: _facts(p) for p in _share(group, sorted(folder.iterdir()))}

    files = {name: facts for part in _together(group, write) for name, facts in part.items()}

    def publish() -> None:
        if group.rank == 0:
            manifest = {"format": _FORMAT, "files": files, "extra": extra, **_settings(optimizer)}
            text = json.dumps(manifest, indent=1).encode()
            _write(folder / "manifest.json", text)
            current = {"version": version, "sha256": hashlib.sha256(text).hexdigest()}
            _write(root / "current.new", json.dumps(current).encode())
            os.replace(root / "current.new", root / "current")
            _sync(root)
            for old in root.glob("version-*"):
                if old.name != version:
                    shutil.rmtree(old, ignore_errors=True)

    _together(group, publish)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedAdamW | None = None,
    *,
    group: Group | None = None,
) -> Any:
    """Read what `save` wrote, at any world size, into model and optimizer. Collective.

    Args:
        path: the folder.
        model, optimizer: of the same parameters, in the same order, as those that were saved.
        group: default: the optimizer's, or all ranks.

    Returns:
        `extra`, as it was given to `save`.

    Raises:
        CheckpointError: nothing there, a file that is missing, cut off or edited, or another
            model's; named. Nothing was loaded.
    """
    group = group or (optimizer.group if optimizer else default_group(None))
    root = Path(path)
    folder, manifest = _together(group, lambda: _opened(root))[group.rank]

    def check() -> None:
        for name in _share(group, sorted(manifest["files"])):
            _must_be(folder / name, *manifest["files"][name])

    _together(group, check)
    reader = _Reader(folder)
    pieces, finish = _empty_pieces(optimizer, manifest)
    tensors: dict[str, Any] = {**_model_tensors(model), **pieces}

    def fits() -> None:
        if optimizer is not None:
            wanted = [[*map(_named, g["params"])] for g in optimizer.param_groups]
            if wanted != manifest["shapes"]:
                raise CheckpointError(
                    f"{folder}: the optimizer must have parameter groups {manifest['shapes']}, "
                    f"got {wanted}; nothing was loaded"
                )
        saved = reader.read_metadata().state_dict_metadata
        for key, value in tensors.items():
            size = torch.Size((value.numel,)) if isinstance(value, _Piece) else value.shape
            found = saved.get(key)
            if not isinstance(found, TensorStorageMetadata):
                raise CheckpointError(f"{folder}: it has no {key}; nothing was loaded")
            if found.size != size:
                raise CheckpointError(
                    f"{folder}: {key} must have shape {list(size)}, got {list(found.size)}; "
                    "nothing was loaded"
                )

    _together(group, fits)

    def read() -> None:
        planner = _LoadPlanner()
        with torch.no_grad(), _quiet():
            load_tensors(tensors, storage_reader=reader, planner=planner, **_ranks_of(group))
        finish()

    _together(group, read)
    return manifest["extra"]


# -- what is written -------------------------------------------------------------------------------


class _Piece:
    """Elements [start, start + n) of a flat tensor of which ranks hold different parts."""

    def __init__(self, tensor: torch.Tensor, start: int, numel: int) -> None:
        self.tensor, self.start, self.numel = tensor, start, numel

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size((self.start,)), self.tensor.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """For torch.distributed.checkpoint, as is the next."""
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(self._chunk(), properties, torch.Size((self.numel,)))
        index = MetadataIndex(name, torch.Size((self.start,)))
        shard = WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
        return [shard] if len(self.tensor) or self.numel == 0 else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if len(self.tensor) else []


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, _Piece) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default copies what is no tensor.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.mappings: dict[str, Any] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, _Piece) else super().lookup_tensor(index)


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidTypeError(
                f"checkpoint: the model's {name} is a {type(value).__name__}, not a tensor; "
                "pass it as extra"
            )
    return {f"model.{name}": value.detach() for name, value in state.items()}


def _owned(optimizer: ShardedAdamW) -> Iterator[tuple[int, Member]]:
    """(index, member) of each parameter that has state; the index is that of `state_dict`."""
    for index, parameter in enumerate(optimizer.parameters()):
        if parameter in optimizer.members:
            yield index, optimizer.members[parameter]


def _optimizer_pieces(optimizer: ShardedAdamW | None) -> dict[str, _Piece]:
    if optimizer is None:
        return {}
    return {
        f"optimizer.{index}.{key}": _Piece(decode(key, member.state), member.start, member.numel)
        for index, member in _owned(optimizer)
        for key in ENTRIES
        if key in member.state
    }


def _empty_pieces(
    optimizer: ShardedAdamW | None, manifest: dict[str, Any]
) -> tuple[dict[str, _Piece], Callable[[], None]]:
    """Where the optimizer's state is to be read to, and what takes it over then."""
    if optimizer is None:
        return {}, lambda: None
    if manifest["steps"] is None:
        raise CheckpointError("checkpoint: it was saved without an optimizer; nothing was loaded")
    pieces: dict[str, _Piece] = {}
    read: dict[int, dict[str, torch.Tensor]] = {}
    for index, member in _owned(optimizer):
        known = dict(enumerate(manifest["steps"])).get(index)
        masters = known is not None and known["master"]
        read[index] = {}
        for key in ENTRIES if known else ():
            if key in member.state and (key != "master_param" or masters):
                dtype = torch.promote_types(member.parameter.dtype, torch.float32)
                read[index][key] = torch.empty(
                    member.stop - member.start, dtype=dtype, device=member.local.device
                )
                pieces[f"optimizer.{index}.{key}"] = _Piece(
                    read[index][key], member.start, member.numel
                )

    def take_over() -> None:
        for group, options in zip(optimizer.param_groups, manifest["groups"], strict=True):
            group.update({**options, "betas": tuple(options["betas"])})
        for index, member in _owned(optimizer):
            known = manifest["steps"][index]
            optimizer.fill(member, known["step"] if known else 0.0, read[index])
        optimizer.skipped_steps = manifest["skipped_steps"]

    return pieces, take_over


def _settings(optimizer: ShardedAdamW | None) -> dict[str, Any]:
    """What is no tensor."""
    if optimizer is None:
        return {"groups": None, "shapes": None, "steps": None, "skipped_steps": 0}
    steps: list[Any] = [None] * sum(1 for _ in optimizer.parameters())
    for index, member in _owned(optimizer):
        state = member.state
        steps[index] = {"step": float(state["step"]), "master": "master_param" in state}
    groups = [
        {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    shapes = [[*map(_named, group["params"])] for group in optimizer.param_groups]
    skipped = optimizer.skipped_steps
    return {"groups": groups, "shapes": shapes, "steps": steps, "skipped_steps": skipped}


def _named(parameter: torch.Tensor) -> str:
    return str(list(parameter.shape))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


# -- files -----------------------------------------------------------------------------------------


def _ranks_of(group: Group) -> dict[str, Any]:
    if group._process_group is None:
        return {"no_dist": True}
    return {"process_group": group._process_group}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _together(group: Group, work: Callable[[], T]) -> list[T]:
    """Every rank's result; where one failed, the same error on all."""
    result, fault = None, None
    try:
        result = work()
    except ParallelKitError as error:
        fault = error
    except (Exception, CheckpointException) as error:  # of the file system, of torch
        fault = CheckpointError(f"checkpoint: {type(error).__name__}: {error}")
        fault.__cause__ = error
    heard = group._gather_objects((result, type(fault), str(fault)))
    for rank, (_, kind, text) in enumerate(heard):
        if issubclass(kind, ParallelKitError):
            raise kind(f"{text} [rank {rank} of {group.size}]") from fault
    return [found for found, _, _ in heard]


def _share(group: Group, files: list[Any]) -> list[Any]:
    """The files that this rank has to hash."""
    return files[group.rank :: group.size]


def _facts(file: Path) -> tuple[int, str]:
    """Size and hash."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as opened:
        while part := opened.read(_HASHED_AT_ONCE):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _must_be(file: Path, size: int, digest: str) -> None:
    if not file.exists():
        raise CheckpointError(f"{file} is missing; nothing was loaded")
    found = _facts(file)
    if found != (size, digest):
        how = f"has {found[0]} bytes instead of {size}" if found[0] != size else "was changed"
        raise CheckpointError(f"{file} {how} since it was saved; nothing was loaded")


def _opened(root: Path) -> tuple[Path, dict[str, Any]]:
    """The version that counts, and its manifest."""
    if not (root / "current").exists():
        raise CheckpointError(f"{root}: there is no checkpoint; nothing was loaded")
    try:
        current = json.loads((root / "current").read_bytes())
        folder = root / current["version"]
        text = (folder / "manifest.json").read_bytes()
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{root / 'current'} is damaged: {error}") from error
    if hashlib.sha256(text).hexdigest() != current["sha256"]:
        raise CheckpointError(
            f"{folder / 'manifest.json'} is not what {root / 'current'} announces; "
            "nothing was loaded"
        )
    manifest = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{folder}: format {manifest['format']}, wanted {_FORMAT}")
    return folder, manifest


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    _sync(file.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Reader(FileSystemReader):
    """Reads the metadata without running what a pickle may ask for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        with file.open("rb") as opened:
            try:
                metadata = _MetadataUnpickler(opened).load()
            except pickle.UnpicklingError as error:
                raise CheckpointError(f"{file}: {error}") from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        found: Metadata = metadata
        return found


class _MetadataUnpickler(pickle.Unpickler):
    ALLOWED = (
        ("torch.distributed.checkpoint.metadata", None),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever metadata has no need of."""
        allowed = any(module == m and name == (n or name) for m, n in self.ALLOWED)
        if "." in name or not (
            allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        ):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which metadata never does")
        return super().find_class(module, name)
