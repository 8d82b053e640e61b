"""What ShardedAdamW refuses: bad options and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .data_parallel import DataParallel
from .errors import InvalidArgumentError, InvalidTypeError
from .group import Group
from .ops import DTYPE_CODES
from .optimizer_layout import local_of

__all__ = [
    "STATE_DTYPES",
    "check_max_norm",
    "check_options",
    "check_parameter",
    "hyper_parameters",
    "names_in_errors",
    "placed_in_words",
    "settings_in_words",
]

_HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")

STATE_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    "int8": torch.int8,
    torch.int8: torch.int8,
}


def check_options(
    group: Group,
    data_parallel: DataParallel | None,
    max_grad_norm: float | None,
    state_dtype: torch.dtype | str,
    master_weights: bool | str,
) -> None:
    """Raise for options of the constructor that torch's AdamW does not have."""
    if data_parallel is not None and not isinstance(data_parallel, DataParallel):
        raise InvalidTypeError(
            "ShardedAdamW: data_parallel must be a parallelkit.DataParallel, got "
            f"{type(data_parallel).__name__}; for torch DDP leave it out"
        )
    if data_parallel is not None and data_parallel.group is not group:
        raise InvalidArgumentError(
            "ShardedAdamW: group must be that of data_parallel, in whose memory the gradients lie; "
            "leave it out"
        )
    if not isinstance(state_dtype, (torch.dtype, str)) or state_dtype not in STATE_DTYPES:
        raise InvalidArgumentError(
            'ShardedAdamW: state_dtype must be torch.float32, torch.bfloat16 or "int8", '
            f"got {state_dtype!r}"
        )
    if not isinstance(master_weights, (bool, str)) or master_weights not in ("auto", True, False):
        raise InvalidArgumentError(
            f'ShardedAdamW: master_weights must be "auto", True or False, got {master_weights!r}'
        )
    check_max_norm("ShardedAdamW", max_grad_norm)


def check_max_norm(call: str, max_grad_norm: object) -> None:
    """Raise unless a gradient can be clipped to this norm; also before a step, it may be set."""
    if max_grad_norm is None:
        return
    if not isinstance(max_grad_norm, Real) or not float(max_grad_norm) > 0:
        raise InvalidArgumentError(
            f"{call}: max_grad_norm must be above 0 or None, got {max_grad_norm!r}"
        )


def hyper_parameters(call: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Those of a parameter group as numbers, by name.

    Raises:
        InvalidArgumentError: one is gone.
        InvalidTypeError: one is no number. What they may be is torch's to say, in the constructor.
    """
    missing = [name for name in _HYPER_PARAMETERS if name not in options]
    if missing:
        raise InvalidArgumentError(f"{call}: the parameter group has no {', '.join(missing)}")
    named = {name: options[name] for name in _HYPER_PARAMETERS}
    betas = named.pop("betas")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InvalidTypeError(f"{call}: betas must be two numbers, got {betas!r}")
    named |= {"beta1": betas[0], "beta2": betas[1]}
    for name, value in named.items():
        single = isinstance(value, torch.Tensor) and value.numel() == 1 and value.isreal().all()
        if not (single or isinstance(value, (float, Real))) or value != value:
            raise InvalidTypeError(f"{call}: {name} must be a number, got {value!r}")
    return {name: float(value) for name, value in named.items()}


def names_in_errors(groups: Iterable[Mapping[str, Any]]) -> dict[torch.Tensor, str]:
    """What errors call the parameters: the names that they were given with, else their places."""
    found = {}
    for g, group in enumerate(groups):
        known = group.get("param_names")
        for i, p in enumerate(group["params"]):
            found[p] = known[i] if known else f"parameter {i} of group {g} {list(p.shape)}"
    return found


def settings_in_words(
    call: str, groups: Iterable[Mapping[str, Any]], max_grad_norm: float | None
) -> list[str]:
    """The hyper-parameters of all parameter groups, one after the other."""
    found = [] if max_grad_norm is None else [f"max_grad_norm={max_grad_norm}"]
    for g, group in enumerate(groups):
        named = hyper_parameters(call, group)
        found += [f"{name}={value} in group {g}" for name, value in named.items()]
    return found


def placed_in_words(p: torch.Tensor) -> str:
    """How a DTensor is split, which all ranks have in common; nothing of any other."""
    if not isinstance(p, DTensor):
        return ""
    return f" {list(p.placements)} over a mesh of {list(p.device_mesh.shape)}"


def check_parameter(name: str, p: torch.Tensor, group: Group) -> None:
    """Raise for a parameter that cannot be stepped."""
    if p.dtype not in DTYPE_CODES:
        raise InvalidTypeError(
            f"ShardedAdamW: {name} must be float32, float64, bfloat16 or float16, got {p.dtype}"
            + ("; make its real and imaginary parts parameters of their own" * p.is_complex())
        )
    device = local_of(p).device
    if device.type != group.device.type:
        raise InvalidArgumentError(f"ShardedAdamW: {name} must be on {group.device}, got {device}")
