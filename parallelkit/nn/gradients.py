"""Gradients of parameters that every rank has whole, but uses for its own part of the work."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelkit.arguments import check_tensor
from parallelkit.group import Group, default_group
from parallelkit.nn import exchange

__all__ = ["sum_gradients"]


def sum_gradients(
    parameters: Iterable[nn.Parameter], group: Group | DeviceMesh | None = None
) -> None:
    """Sum these parameters' gradients over the group in every backward pass from now on.

    For norms between a row and a column layer with sequence parallelism, which see their rank's
    tokens only, and norms of split heads. `pk.tensor_parallel` does it for the models it splits.

    Args:
        parameters: whole on every rank, in the same order; a second call for one does nothing.
        group: a Group or one-dimensional DeviceMesh. Default: all ranks.
    """
    group = default_group(group)
    parameters = list(parameters)
    for parameter in parameters:
        check_tensor("sum_gradients", "a parameter", parameter)

    def total(grad: torch.Tensor) -> torch.Tensor:
        return exchange.all_reduce(grad, group)

    for parameter in parameters:
        if parameter.requires_grad and not hasattr(parameter, "tp_summed_over"):
            parameter.tp_summed_over = group  # type: ignore[attr-defined]
            parameter.register_hook(total)
