"""What a weighted collective must give: the exact value, how far from it a result may lie, and the
one value it must be where the order of additions is fixed. Nothing here is our own arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

Array = np.ndarray

# Unit roundoff of the arithmetic in which a dtype is added, and half its smallest number.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
TINY = {torch.float32: np.longdouble(2.0) ** -150, torch.float64: np.longdouble(2.0) ** -1075}


def added_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers in row-major order; complex ones as pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def numbers(tensor: torch.Tensor) -> Array:
    """In extended precision: 64 bits of significand or more, against the 53 of a result."""
    return real(tensor).double().numpy().astype(np.longdouble)


def exact(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], reduction: str = "mean"
) -> tuple[Array, Array]:
    """sum w x / sum w (or sum x / sum w) over the ranks of positive weight, and the same of |x|."""
    total = np.longdouble(0) + sum(np.longdouble(float(w)) for w in weights)
    value = np.zeros(real(tensors[0]).shape, np.longdouble)
    size = value.copy()
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight > 0:
            factor = np.longdouble(float(weight)) if reduction == "mean" else np.longdouble(1)
            value += numbers(tensor) * factor / total
            size += abs(numbers(tensor)) * factor / total
    return value, size


def assert_weighted(
    result: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[float],
    reduction: str = "mean",
    what: object = "",
) -> None:
    """`result` is the weighted mean (or sum over weights) of finite `tensors`, one of each rank.

    R ranks, u the unit roundoff: |result - exact| <= u (|exact| + (R+1) S) with S the same sum over
    |x|. 16-bit results are a float32 number within this bound, rounded once to nearest even.
    """
    value, size = exact(tensors, weights, reduction)
    wide = added_in(result.dtype)
    ranks = len(tensors)
    bound = UNIT[wide] * (abs(value) + (ranks + 1) * size) + (ranks + 1) * TINY[wide]
    got = numbers(result)
    assert result.shape == tensors[0].shape and result.dtype == tensors[0].dtype, what
    if result.dtype in (torch.bfloat16, torch.float16):
        low, high = (
            numbers(torch.tensor(edge.astype(np.float64)).to(result.dtype))
            for edge in (value - bound, value + bound)
        )
    else:
        low, high = value - bound, value + bound
    wrong = ~((low <= got) & (got <= high))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} wrong, first at {at}: got {got[at]!r}, "
            f"exact {value[at]!r}, allowed {low[at]!r} to {high[at]!r}"
        )


def chain(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], reduction: str = "mean"
) -> torch.Tensor:
    """The one right result of ranks that add in rank order with float32 fma, rounded to the dtype.

    c_0 x_0, then fma(c_r, x_r, sum) over the ranks of positive weight, with c_r the float64
    quotient w_r / sum w (or 1 / sum w) as a float32 number.
    """
    total = math.fsum(weights)
    shape = real(tensors[0]).shape
    value: Array | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight == 0:
            continue
        c = np.float64(np.float32((weight if reduction == "mean" else 1.0) / total))
        product = c * real(tensor).double().numpy()  # 24 and 24 bits: exact in float64
        value = product.astype(np.float32) if value is None else _sum_to_float32(product, value)
    out = torch.zeros(shape) if value is None else torch.tensor(value)
    dtype = tensors[0].dtype
    if tensors[0].is_complex():
        return torch.complex(out[..., 0], out[..., 1])
    return out.to(dtype)


def _sum_to_float32(product: Array, addend: Array) -> Array:
    """product + addend rounded once to float32: float64 rounded to odd, then to nearest even.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms
    using rounding to odd", IEEE Trans. Computers 57 (2008).
    """
    b = addend.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities and NaNs come out right
        total = product + b
        other = total - product
        lost = (product - (total - other)) + (b - other)  # Knuth's TwoSum: total + lost is exact
    bits = np.atleast_1d(total).view(np.int64)
    up = np.sign(lost) == np.sign(total)
    odd = np.where((lost != 0) & (bits % 2 == 0), np.where(up, bits + 1, bits - 1), bits)
    with np.errstate(over="ignore", invalid="ignore"):
        return odd.view(np.float64).astype(np.float32).reshape(np.shape(total))


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's numbers bit by bit, in row-major order."""
    values = real(tensor)
    flat = values.new_empty(values.numel()).copy_(values.reshape(-1))  # strides of 1, always
    return flat.view(torch.uint8).numpy().tobytes()
