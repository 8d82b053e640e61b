"""What a checkpoint holds of a tensor: boxes, wherever they lie in whatever rank's memory.

A file has tensors as the unsplit model has them. A rank holds boxes of those: the elements that it
owns of an optimizer's state, its shard of a split layer, or both at once. torch.distributed.
checkpoint writes each box once, and reads any box out of those that were written, so that neither
the number of ranks nor the way in which layers are split is part of a file.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.metadata as metadata_module
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .checkpoint_files import CheckpointError
from .errors import InvalidArgumentError, InvalidTypeError
from .layout import memory_order
from .optimizer_layout import Member
from .optimizer_state import like

__all__ = [
    "LoadPlanner",
    "Parts",
    "Reader",
    "SavePlanner",
    "Stored",
    "model_tensors",
    "owned_parts",
    "state_of",
    "unasked",
]

_MODEL = "model."  # what the names of the model's tensors begin with in the files

Box = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole, and what it holds


class Parts:
    """A tensor of which this rank holds some boxes.

    Args:
        shape: of the whole.
        boxes: views of this rank's memory, which are read from or written to.
        example: of the same dtype.
    """

    def __init__(self, shape: torch.Size, boxes: list[Box], example: torch.Tensor) -> None:
        self.shape, self.dtype = shape, example.dtype
        self._properties = TensorProperties.create_from_tensor(example)
        self.boxes = {torch.Size(offset): box for offset, box in boxes if box.numel()}
        if self.numel == 0:  # it has to be in the file nevertheless
            self.boxes = {torch.Size([0] * len(shape)): example.new_empty(shape)}

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For torch.distributed.checkpoint, as is the next."""
        return [ChunkStorageMetadata(offset, box.shape) for offset, box in self.boxes.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self._properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def lookup(self, index: MetadataIndex) -> torch.Tensor:
        """The box that begins where the index says."""
        assert index.offset is not None
        return self.boxes[index.offset]


Stored = torch.Tensor | Parts


class SavePlanner(DefaultSavePlanner):
    """torch's own, which takes `Parts` too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of a write item."""
        value = self.state_dict[index.fqn]
        return value.lookup(index) if isinstance(value, Parts) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's own, which takes `Parts` too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As torch's, which would copy what is no tensor."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.mappings: dict[str, Any] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that a read item fills."""
        value = self.state_dict[index.fqn]
        return value.lookup(index) if isinstance(value, Parts) else super().lookup_tensor(index)


# -- boxes -----------------------------------------------------------------------------------------


def _whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape that a parameter has in the unsplit model."""
    split = getattr(parameter, "tp_split", None)
    return parameter.shape if split is None else torch.Size(split.whole_shape(parameter))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state by name, parameters as they are; raises for what cannot be in a file."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidTypeError(
                f"checkpoint: the model's {name} is a {type(value).__name__}, not a tensor; "
                "pass it as extra"
            )
        if value.is_meta:
            raise InvalidArgumentError(
                f"checkpoint: the model's {name} is on the meta device, which holds no values; "
                "call model.to_empty(device=...) first"
            )
    return dict(state)


def model_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """The model's state as files have it, with `Parts` for what tensor-parallel ranks share."""
    found: dict[str, Stored] = {}
    for name, value in state.items():
        shard = value.detach()
        if getattr(value, "tp_split", None) is None:
            found[_MODEL + name] = shard
        else:
            boxes = list(_in_whole(value, (0,) * value.dim(), shard))
            found[_MODEL + name] = Parts(_whole_shape(value), boxes, shard)
    return found


def owned_parts(member: Member, owned: torch.Tensor) -> Stored:
    """State of what this rank owns of a parameter, where it lies in the unsplit one.

    Args:
        member: says what is owned.
        owned: [n] in the parameter's order of memory; the result shares its memory.
    """
    parameter, local = member.parameter, member.local
    order = memory_order(local)
    laid = [local.shape[d] for d in order]  # rows first, as memory has them
    back = [order.index(d) for d in range(local.dim())]
    if isinstance(parameter, DTensor):
        return like(owned.view(laid).permute(back), parameter)
    if getattr(parameter, "tp_group", None) and not hasattr(parameter, "tp_split"):
        raise InvalidArgumentError(
            f"checkpoint: {member.name} has a tp_group but no tp_split, so that where its part "
            "lies in the whole is not known; make it by parallelkit's own layers"
        )
    boxes: list[Box] = []
    at = 0
    for offset, sizes in _boxes(laid, member.start, member.stop):
        count = math.prod(sizes)
        box = owned[at : at + count].view(sizes).permute(back)
        boxes += _in_whole(parameter, tuple(offset[d] for d in back), box)
        at += count
    return Parts(_whole_shape(parameter), boxes, owned)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Elements [start, stop) of a row-major array as (offset, sizes), one after the other."""
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one
        for offset, sizes in _boxes(shape[1:], start - last * row, stop - last * row):
            yield [last, *offset], [1, *sizes]
        return
    for offset, sizes in _boxes(shape[1:], start - (first - 1) * row, row):
        yield [first - 1, *offset], [1, *sizes]
    if first < last:
        yield [first] + [0] * (len(shape) - 1), [last - first, *shape[1:]]
    for offset, sizes in _boxes(shape[1:], 0, stop - last * row):
        yield [last, *offset], [1, *sizes]


def _in_whole(parameter: torch.Tensor, offset: tuple[int, ...], box: torch.Tensor) -> Iterator[Box]:
    """A box of this rank's part of a parameter as boxes of the unsplit parameter."""
    split = getattr(parameter, "tp_split", None)
    if split is None:
        yield offset, box
        return
    d, at = split.dim, 0
    for first, last in split.ranges():  # elements [at, at + last - first) here are [first, last)
        low = max(offset[d], at)
        high = min(offset[d] + box.shape[d], at + last - first)
        if low < high:
            begin = (*offset[:d], first + low - at, *offset[d + 1 :])
            yield begin, box.narrow(d, low - offset[d], high - low)
        at += last - first


# -- reading without running -----------------------------------------------------------------------


class Reader(FileSystemReader):
    """Reads the metadata without running what a pickle may ask for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the version."""
        file = Path(self.path) / ".metadata"
        with file.open("rb") as stream:
            try:
                metadata = _MetadataUnpickler(stream).load()
            except Exception as error:  # a pickle that was edited can raise anything
                raise CheckpointError(f"{file}: {error}; nothing was loaded") from error
        if not isinstance(metadata, Metadata):
            kind = type(metadata).__name__
            raise CheckpointError(f"{file} holds a {kind}, no metadata; nothing was loaded")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def unasked(folder: Path, reader: Reader, tensors: Mapping[str, Stored]) -> set[str]:
    """What was saved of the model and is not asked for; raises for a tensor that does not fit.

    Args:
        folder: what is read, for errors.
        reader: of it.
        tensors: the model's, by name.
    """
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
    return {name for name in saved if name.startswith(_MODEL) and name not in tensors}


class _MetadataUnpickler(pickle.Unpickler):
    NAMES = (
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever metadata has no need of."""
        found = super().find_class(module, name) if self._harmless(module, name) else None
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which metadata never does")
        return found

    def _harmless(self, module: str, name: str) -> bool:
        if module == metadata_module.__name__:  # what it defines, not what it imports
            return getattr(getattr(metadata_module, name, None), "__module__", None) == module
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return dtype or (module, name) in self.NAMES
