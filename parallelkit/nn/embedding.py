"""Embeddings split over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.agreement import refuse_instead
from parallelkit.arguments import check_tensor
from parallelkit.errors import (
    InvalidArgumentError,
    InvalidIndexError,
    InvalidTypeError,
    ParallelKitError,
)
from parallelkit.group import Group, default_group
from parallelkit.nn.functional import gather_from_group, reduce_from_group
from parallelkit.nn.split import Split, check_layer, draw_shard, local_part

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FeatureParallelEmbedding", "VocabParallelEmbedding"]

Tensor = torch.Tensor


class SplitEmbedding(nn.Embedding):
    """What both embeddings share: a table cut along one of its dimensions."""

    split_dim: int

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would make the whole table
        name = type(self).__name__
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        check_layer(name, sizes, device, dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        if padding_idx is not None:
            if not isinstance(padding_idx, int) or not (
                -num_embeddings <= padding_idx < num_embeddings
            ):
                raise InvalidArgumentError(
                    f"{name}: padding_idx must be within the {num_embeddings} embeddings, got "
                    f"{padding_idx!r}"
                )
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        split = self._join(default_group(group))
        shape = [num_embeddings, embedding_dim]
        shape[self.split_dim] = self._range[1] - self._range[0]
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        split.mark(self.weight)
        self.reset_parameters()

    def _join(self, group: Group) -> Split:
        """Be one of a group's ranks; how its tables are cut."""
        self.group = group
        split = self._split()
        (self._range,) = split.ranges()
        return split

    def _split(self) -> Split:
        shape = (self.num_embeddings, self.embedding_dim)
        return Split(self.group, self.split_dim, shape[self.split_dim])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._split().mark(self.weight)  # a copied parameter has lost its marks

    def reset_parameters(self) -> None:
        """Draw as nn.Embedding does; the same whole table at any number of ranks."""
        draw_shard(self.weight, self._split(), nn.init.normal_)
        row = self._padding_row()
        if row is not None:
            with torch.no_grad():
                self.weight[row] = 0

    def _padding_row(self) -> int | None:
        """Where this rank has the padding's row."""
        if self.padding_idx is None or self.split_dim == 1:
            return self.padding_idx
        start, stop = self._range
        return self.padding_idx - start if start <= self.padding_idx < stop else None

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: Group | DeviceMesh | None = None
    ) -> Self:
        """This rank's part of a table that every rank has whole.

        Of a class that changes only what nn.Embedding returns, such as one that scales, too: then
        the result is of that class as well.
        """
        if not isinstance(embedding, nn.Embedding):
            raise InvalidTypeError(
                f"{cls.__name__}.from_embedding: embedding must be an nn.Embedding, got "
                f"{type(embedding).__name__}"
            )
        kind = type(embedding)
        own = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})
        made: Self = cls.__new__(own)
        made.__dict__.update(embedding.__dict__)
        made._parameters = dict(embedding._parameters)
        split = made._join(default_group(group))
        whole = embedding.weight
        made.weight = nn.Parameter(split.take(whole.detach()), whole.requires_grad)
        split.mark(made.weight)
        return made

    def to_embedding(self) -> nn.Embedding:
        """The whole table as nn.Embedding, on every rank; collective."""
        made = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta"
        )
        made.weight = nn.Parameter(self._split().gather(self.weight), self.weight.requires_grad)
        return made.train(self.training)

    def _check(self, ids: Tensor) -> None:
        """Raise, on every rank, for what cannot be looked up here."""
        try:
            self._check_here(ids)
        except ParallelKitError as fault:
            raise refuse_instead(self.group, fault) from fault

    def _check_here(self, ids: Tensor) -> None:
        """IndexError as nn.Embedding's, which masking would hide; not on GPUs: it would wait."""
        name = type(self).__name__
        check_tensor(name, "ids", ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise InvalidTypeError(f"{name}: ids must be int64 or int32, got {ids.dtype}")
        if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
            return
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= self.num_embeddings:
            raise InvalidIndexError(
                f"{name}: ids must be in [0, {self.num_embeddings}), got {low if low < 0 else high}"
            )

    def extra_repr(self) -> str:
        """As nn.Embedding's, with what is split."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, "
            + (f"padding_idx={self.padding_idx}, " if self.padding_idx is not None else "")
            + f"rank {self.group.rank} of {self.group.size}"
        )


class VocabParallelEmbedding(SplitEmbedding):
    """nn.Embedding with the vocabulary split: this rank has `shard_bounds(num_embeddings, ...)`.

        ids [...] int, equal on every rank     y [..., embedding_dim], equal on every rank

    Args:
        num_embeddings, embedding_dim, padding_idx: as nn.Embedding; need not be divisible.
        group: a Group or one-dimensional DeviceMesh.
        device, dtype: as nn.Embedding.
    Raises:
        InvalidArgumentError, InvalidTypeError: a bad size or padding_idx, on this rank: to make a
            layer communicates nothing.
        InvalidTypeError: in `forward` ids that are no integers. This and the next on every rank.
        InvalidIndexError: (an IndexError) in `forward` an id is outside the table; looked for on
            CPUs.
    Cost: forward, one sum of y over the group.
    """

    split_dim = 0

    def forward(self, ids: Tensor) -> Tensor:
        """The ids' rows of the whole table."""
        self._check(ids)
        weight = local_part(self.weight)
        start, stop = self._range
        if start == stop:  # sums need this rank's gradient graph too
            nothing = weight.new_zeros(*ids.shape, self.embedding_dim) + weight.sum()
            return reduce_from_group(nothing, self.group)
        elsewhere = (ids < start) | (ids >= stop)
        local = (ids - start).masked_fill(elsewhere, 0)
        y = F.embedding(local, weight, self._padding_row())
        return reduce_from_group(y.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class FeatureParallelEmbedding(SplitEmbedding):
    """nn.Embedding with the features split; arguments as `VocabParallelEmbedding`.

    Cost: forward, one gather of y.
    """

    split_dim = 1

    def forward(self, ids: Tensor) -> Tensor:
        """The ids' rows of the whole table."""
        self._check(ids)
        y = F.embedding(ids, local_part(self.weight), self._padding_row())
        return gather_from_group(y, self.group, length=self.embedding_dim)
