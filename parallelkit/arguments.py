"""What arguments mean: weights, reductions, sizes, and the signature of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from .errors import InvalidArgumentError, InvalidTypeError
from .ops import DTYPE_CODES
from .transport import REDUCTIONS

__all__ = [
    "Weight",
    "as_number",
    "as_size",
    "check_tensor",
    "described",
    "reduction_name",
    "reduction_number",
    "signature_of",
]

Weight = int | float | torch.Tensor

_NAMES = {number: f"reduction {name}" for name, number in REDUCTIONS.items()}
_KINDS = {d: n for n, d in enumerate((*DTYPE_CODES, torch.complex64, torch.complex128))}


def as_number(name: str, weight: Weight) -> float:
    """A weight as a float; InvalidTypeError, in the name of the call, where it is no number."""
    if isinstance(weight, (int, float)):
        try:
            return float(weight)
        except OverflowError:
            return math.inf  # refused with every other weight that is not finite
    if isinstance(weight, torch.Tensor) and weight.dim() == 0 and not weight.is_complex():
        return float(weight.detach())
    raise InvalidTypeError(
        f"{name}: weight must be an int, a float or a 0-dim tensor, got {type(weight).__name__}"
        + (f" of shape {list(weight.shape)}" if isinstance(weight, torch.Tensor) else "")
    )


def reduction_number(name: str, reduction: str) -> int:
    """The number of a reduction; InvalidArgumentError where there is none of that name."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise InvalidArgumentError(
            f'{name}: reduction must be "mean", "sum" or "total", got {reduction!r}'
        )
    return REDUCTIONS[reduction]


def reduction_name(number: int) -> str:
    """The reduction of this number, as errors show it."""
    return _NAMES[number]


def check_tensor(call: str, name: str, value: object) -> None:
    """InvalidTypeError where the argument of this name is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise InvalidTypeError(f"{call}: {name} must be a tensor, got {type(value).__name__}")


def as_size(call: str, name: str, value: Any) -> int:
    """A number of elements as an int; raises where it is none."""
    try:
        size = operator.index(value)
    except TypeError:
        raise InvalidTypeError(
            f"{call}: {name} must be an int, got {type(value).__name__}"
        ) from None
    if size < 0:
        raise InvalidArgumentError(f"{call}: {name} must be at least 0, got {size}")
    return size


def described(tensor: torch.Tensor) -> str:
    """Dtype and shape, as errors show them."""
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")


def signature_of(tensors: Sequence[torch.Tensor]) -> int:
    """A number that differs between lists of other count, shapes or dtypes; equal on every rank."""
    number = len(tensors)
    for tensor in tensors:
        number = hash((number, _KINDS[tensor.dtype], tensor.shape))
    return number & (1 << 63) - 1
