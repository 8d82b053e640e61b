"""Tensors of any dtype from one rank to all, by way of a weighted mean in which it alone counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .collectives import weighted_all_reduce_
from .group import Group

__all__ = ["broadcast"]


def broadcast(tensors: Sequence[torch.Tensor], source: int, group: Group) -> None:
    """Give every rank the tensors of rank `source`. Collective."""
    distinct = {(t.data_ptr(), t.numel(), t.dtype): t.detach() for t in tensors if t.numel()}
    floats = [t for t in distinct.values() if t.is_floating_point() or t.is_complex()]
    others = [t for t in distinct.values() if not (t.is_floating_point() or t.is_complex())]
    # float16 holds the value of any byte.
    coded = [t.contiguous().view(-1).view(torch.uint8).half() for t in others]
    if distinct:
        weighted_all_reduce_([*floats, *coded], float(group.rank == source), group)
    for tensor, code in zip(others, coded, strict=True):
        tensor.copy_(code.to(torch.uint8).view(tensor.dtype).view(tensor.shape))
