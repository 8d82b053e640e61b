"""Tensors of any strides as contiguous stretches of real numbers, which is what transports move."""

from __future__ import annotations

import torch

from .errors import InvalidArgumentError, InvalidTypeError
from .ops import DTYPE_CODES

__all__ = ["COPY", "copy_back", "flat_view", "is_flat", "memory_order"]

COPY = -1  # the layout of what is no view
_HASHES = (1 << 62) - 1
_EXACT_CHECK_ELEMENTS = 1 << 24  # larger tensors count as overlapping where strides leave doubt


def is_flat(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is its own flat view: the common case, decided fast."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in DTYPE_CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device == device
        and not tensor.is_neg()
    )


def flat_view(name: str, tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int]:
    """A contiguous real view of a tensor's memory and the number of its layout.

    The layout is 0 in row-major order and a hash of the order of dimensions for other dense tensors
    (transposed, channels_last). Where there is no such view (gaps between elements, lazy
    conjugation) the layout is COPY and the tensor returned is a row-major copy.

    Args:
        name: of the argument, for errors.
        tensor: any strides; float32, float64, bfloat16, float16, complex64 or complex128.
        device: where it has to be.

    Raises:
        InvalidTypeError: not a tensor, or a dtype without a mean.
        InvalidArgumentError: elements overlap, sparse, or another device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (*DTYPE_CODES, torch.complex64, torch.complex128):
        raise InvalidTypeError(
            f"{name} must be float32, float64, bfloat16, float16, complex64 or complex128, got "
            f"{tensor.dtype}; integers have no mean: convert them first"
        )
    if tensor.layout != torch.strided or tensor.device.type != device.type:
        raise InvalidArgumentError(
            f"{name} must be a strided tensor on {device}, got {tensor.layout} on {tensor.device}"
        )
    if is_flat(tensor, device):
        return tensor, 0
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return _real(tensor.resolve_conj().resolve_neg().contiguous()), COPY
    order = memory_order(tensor)
    dense = tensor.permute(order)
    if dense.is_contiguous():
        in_order = tensor.is_contiguous()
        return _real(dense), 0 if in_order else 1 + hash(tuple(order)) % _HASHES
    if _overlaps(dense):
        raise InvalidArgumentError(
            f"{name} has elements that share memory (shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}); pass a copy: tensor.contiguous()"
        )
    return _real(tensor.contiguous()), COPY


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the one whose elements lie farthest apart to the nearest."""
    strides, sizes = tensor.stride(), tensor.shape
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], -sizes[d]))


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Write a copy made by `flat_view` back into the tensor it was made from."""
    with torch.no_grad():
        tensor.copy_((torch.view_as_complex(flat) if tensor.is_complex() else flat).view_as(tensor))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory; dimensions are given by falling stride."""
    if tensor.numel() == 0:
        return False
    reach = 0  # the farthest element of the faster dimensions
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if size == 1:
            continue
        if stride <= reach:  # interleaved, or overlapping: look closer
            if stride == 0 or tensor.numel() > _EXACT_CHECK_ELEMENTS:
                return True
            offsets = torch.zeros(1, dtype=torch.int64)
            for n, step in zip(tensor.shape, tensor.stride(), strict=True):
                offsets = (offsets.unsqueeze(-1) + torch.arange(n) * step).reshape(-1)
            return bool(offsets.unique().numel() < offsets.numel())
        reach += (size - 1) * stride
    return False
