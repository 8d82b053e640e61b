"""What rank functions of several test files share.

Data depend on (seed, rank) alone, so that every rank knows all ranks' inputs without being told.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import oracle
import torch

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.transport import shared_memory

NATIVE = cpu is not None
SIZES = (1, 2, 3, 8)
ALGORITHMS = ("auto", "direct", "ring", "reference")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


def adds_in_rank_order(group: pk.Group) -> bool:
    """Whether results are equal to the bit, whatever the algorithm, the memory and the list.

    Plain torch.distributed promises less: equality over ranks, and the error bound.
    """
    return group.transport in ("single", "shared-memory")


def small_slots(slot_bytes: int = 8192) -> None:
    """Let groups made from now on in this process stage in many small steps."""
    shared_memory._SLOT_BYTES = slot_bytes


def random(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of very different sizes, the same wherever they are made."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    pairs = (*shape, 2) if dtype.is_complex else tuple(shape)
    values = torch.randn(pairs, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-3, 3, pairs, generator=generator)
    return torch.view_as_complex(values).to(dtype) if dtype.is_complex else values.to(dtype)


def weights_of(seed: int, size: int) -> list[float]:
    """One weight a rank: counts, fractions, and now and then a rank with nothing."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (size,), generator=generator).double()
    counts *= 0.5 ** torch.randint(0, 2, (size,), generator=generator)
    counts[seed % size] += 1
    return counts.tolist()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for tensors that are equal to the bit."""
    return hashlib.sha256(b"|".join(oracle.bits(tensor) for tensor in tensors)).hexdigest()


def message_of(kind: type[Exception], call: Callable[[], object]) -> str:
    """What an error of this kind says; fails where the call raises none or another."""
    try:
        call()
    except pk.ParallelKitError as error:
        assert isinstance(error, kind), f"{type(error).__name__}: {error}"
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def same(values: Sequence[object]) -> bool:
    """Whether every rank returned the same."""
    return all(value == values[0] for value in values)


def in_shared_memory(group: pk.Group, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in memory that peers reach, each a view of one arena."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.nbytes + 16 - tensor.nbytes % 16)
    arena = group.empty(starts[-1], dtype=torch.uint8)
    return [
        arena[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for start, tensor in zip(starts, tensors, strict=False)
    ]


LAYOUTS = (
    "row-major",
    "transposed",
    "channels_last",
    "gaps",
    "interleaved",
    "conjugate",
    "negative",
)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another arrangement of memory; `values` is 4-D."""
    if layout == "row-major":
        return values.clone()
    if layout == "transposed":
        return values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    if layout == "gaps":
        base = torch.full([2 * n for n in values.shape], math.nan, dtype=values.dtype)
        view = base[::2, 1::2, ::2, 1::2]
    elif layout == "interleaved":  # strides (1, 3) over sizes (3, 2): dense, rows inside columns
        flat = torch.empty(values.numel(), dtype=values.dtype)
        a, b, c, d = values.shape
        view = flat.as_strided(values.shape, (1, a * c * d, a * d, a))
    elif layout == "conjugate":
        view = torch.empty_like(values).conj()
    else:
        view = torch.empty(values.shape, dtype=torch.complex128).conj().imag
        assert layout == "negative" and view.is_neg()
        view = view if values.dtype == torch.float64 else values.clone()
    view.copy_(values)
    return view
