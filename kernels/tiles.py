"""A tile of a matrix [R, C], read or written by pointers or by descriptor.

A descriptor lets sm_90 and later move the tile by TMA: one instruction, bounds handled by the
hardware. It wants a 16-byte aligned matrix whose last dimension is contiguous; `describable` says
whether a tensor is one, or is one once transposed. Everything else goes by pointers.
"""

import torch
import triton
import triton.language as tl


def describable(matrix: torch.Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 bytes, as TMA wants it."""
    stride, unit = matrix.stride()
    size = matrix.element_size()
    return (
        unit == 1
        and stride > 0
        and stride * size % 16 == 0
        and matrix.data_ptr() % 16 == 0
        # The smallest box is 16 bytes wide; thinner matrices are not worth a path of their own.
        and matrix.shape[1] * size >= 16
    )


@triton.jit
def offsets(r, c, stride_r, stride_c):
    """Of elements [r, c], in 64 bits: a matrix may span more than 2^31 elements."""
    return r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c


@triton.jit
def describe(t, R, C, stride_r, stride_c, BR: tl.constexpr, BC: tl.constexpr, T: tl.constexpr):
    """A descriptor of t for tiles [BR, BC]; T: of its transpose, for a t contiguous along R."""
    if T:
        t = tl.make_tensor_descriptor(t, [C, R], [stride_c, 1], [BC, BR])
    else:
        t = tl.make_tensor_descriptor(t, [R, C], [stride_r, 1], [BR, BC])
    return t


@triton.jit
def load_tile(
    t, r0, c0, R, C, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, DESCRIPTOR: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """t[r0 : r0 + BR, c0 : c0 + BC], zero beyond t's edges."""
    if DESCRIPTOR:
        tile = t.load([c0, r0]).T if T else t.load([r0, c0])
    else:
        r = r0 + tl.arange(0, BR)
        c = c0 + tl.arange(0, BC)
        inside = (r < R)[:, None] & (c < C)[None, :]
        tile = tl.load(t + offsets(r, c, stride_r, stride_c), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    t, tile, r0, c0, R, C, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """t[r0 : r0 + BR, c0 : c0 + BC] = tile, rounded to t's dtype; nothing beyond t's edges."""
    if DESCRIPTOR:
        t.store([r0, c0], tile.to(t.dtype))
    else:
        r = r0 + tl.arange(0, BR)
        c = c0 + tl.arange(0, BC)
        inside = (r < R)[:, None] & (c < C)[None, :]
        tile = tile.to(t.dtype.element_ty)
        tl.store(t + offsets(r, c, stride_r, stride_c), tile, mask=inside)
