"""The directions of a linear layer in plain PyTorch: what runs without Triton.

The functions of `parallelkit.kernels.linear`, argument for argument; `x [M, K]`, `W [N, K]`,
`y, z, dz [M, N]`, and in gated layers `W [2N, K]`, `z, dz [M, 2N]`, the gate's half first.

As in the kernels, products are summed in fp32 and what follows them is in fp32, with two
exceptions: where a 16-bit product is left to PyTorch, z is rounded to 16 bits before the
activation; and on a GPU each step rounds, for the casts would cost more passes over memory.

CPUs without 16-bit instructions run PyTorch's own 16-bit products at 0.6 to 30 GFLOP/s, against 60
to 100 in fp32. There, blocks are converted, multiplied in fp32 and rounded once; no matrix is ever
held in fp32 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from parallelkit.ops import wide_dtype

__all__ = [
    "ACTIVATIONS",
    "activation_gradient",
    "add_weight_gradient",
    "forward",
    "input_gradient",
    "multiplies_natively",
    "partial_sum",
    "weight_gradient",
]

Tensor = torch.Tensor
Block = tuple[slice, slice]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
# dy, z -> dy·act'(z)
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, z: torch.ops.aten.threshold_backward(dy, z, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}

# A block of operands (3 MB in fp32) and its result stay in the caches of one or two cores.
BLOCK_I, BLOCK_J, BLOCK_L = 256, 512, 1024
BLOCK_ELEMENTS = 2**18  # of what is done element by element


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU's products of a dtype are left to PyTorch: it has instructions for it."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    onednn = torch.backends.mkldnn
    if not onednn.is_available() or not onednn.enabled:
        return False
    # What PyTorch itself asks before it hands a product to oneDNN. Not a measurement: ranks that
    # measured differently would compute differently.
    bf16 = dtype == torch.bfloat16
    ask = torch.ops.mkldnn
    return bool(ask._is_mkldnn_bf16_supported() if bf16 else ask._is_mkldnn_fp16_supported())


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gated: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x·Wᵀ + b) + residual, and z = x·Wᵀ + b if it is to be kept for the backward pass."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    n = weight.shape[0] // 2 if gated else weight.shape[0]

    def finish(block: Block, z: Tensor, up: Tensor | None) -> Tensor:
        if activation is not None:
            z = ACTIVATIONS[activation](z)
        if up is not None:
            z = z * up
        if residual is not None:
            z = z + residual[block]
        return z

    if _by_blocks(x):
        y = x.new_empty(x.shape[0], n, dtype=dtype)
        pre = x.new_empty(x.shape[0], weight.shape[0]) if keep else None
        for rows, columns in _blocks(x.shape[0], n, BLOCK_I, BLOCK_J):
            sums = []
            for part in (columns, _shifted(columns, n)) if gated else (columns,):
                sums.append(_block_product(x[rows], weight[part]))
                if bias is not None:
                    sums[-1] += bias[part]
                if pre is not None:
                    pre[rows, part] = sums[-1]
            y[rows, columns] = finish((rows, columns), sums[0], sums[1] if gated else None)
        return y, pre

    z = F.linear(x, weight, bias)
    gate, up = (z[:, :n], z[:, n:]) if gated else (z, None)
    if activation is None and residual is None:
        y = z
    elif (
        x.device.type != "cpu" or wide_dtype(x.dtype) == x.dtype or (not gated and residual is None)
    ):
        y = finish((slice(None), slice(None)), gate, up)  # one step rounds but once by itself
    else:
        y = x.new_empty(x.shape[0], n, dtype=dtype)
        for block in _row_blocks(y):
            y[block] = finish(block, gate[block].float(), None if up is None else up[block].float())
    return y, z if keep else None


def partial_sum(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x·Wᵀ, plus the bias on the one rank that gives it, rounded to out's dtype only."""
    if out.dtype == x.dtype and not _by_blocks(x):
        if bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)
        return
    for block, total in _wide_product(x, weight):
        if bias is not None:
            total += bias[block[1]]
        out[block] = total


def input_gradient(
    dz: Tensor, weight: Tensor, pre: Tensor | None, activation: str | None, gated: bool
) -> Tensor:
    """dx = dz·W; with a pre, dx = (dz·W)·act'(pre): the dz of the layer before, gated or not."""
    if not _by_blocks(dz):
        dx = dz @ weight
        if pre is None or activation is None:
            return dx
        return activation_gradient(dx, pre, activation, gated)
    dx = dz.new_empty(dz.shape[0], weight.shape[1] * (2 if gated else 1))
    for block, total in _wide_product(dz, weight.T):
        if pre is None or activation is None:
            dx[block] = total
        else:
            _through_activation(total, pre, dx, block, activation, gated)
    return dx


def weight_gradient(
    dz: Tensor, x: Tensor, bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """dW = dzᵀ·x and, if there is a bias, db = Σ dz."""
    dbias = _column_sums(dz).to(dtype) if bias else None
    if dtype == x.dtype and not _by_blocks(x):
        return dz.T @ x, dbias
    dweight = x.new_empty(dz.shape[1], x.shape[1], dtype=dtype)
    for block, total in _wide_product(dz.T, x.T):
        dweight[block] = total
    return dweight, dbias


def add_weight_gradient(dz: Tensor, x: Tensor, dweight: Tensor, dbias: Tensor | None) -> None:
    """The same, added to what the gradients' buffers hold, fp32 or 16 bits."""
    if dweight.dtype == x.dtype and not _by_blocks(x):
        dweight.addmm_(dz.T, x)
    else:
        for block, total in _wide_product(dz.T, x.T):
            dweight[block] += total
    if dbias is not None:
        dbias += _column_sums(dz)


def activation_gradient(dy: Tensor, pre: Tensor, activation: str, gated: bool) -> Tensor:
    """dz = dy·act'(z)."""
    if not gated and (dy.device.type != "cpu" or dy.dtype == pre.dtype):
        return _GRADIENTS[activation](dy, pre)  # fp32 inside, rounded once
    dz = torch.empty_like(pre, memory_format=torch.contiguous_format)
    for block in _row_blocks(dy):
        d = dy[block].to(wide_dtype(dy.dtype)) if dy.device.type == "cpu" else dy[block]
        _through_activation(d, pre, dz, block, activation, gated)
    return dz


def _through_activation(
    d: Tensor, pre: Tensor, dz: Tensor, block: Block, activation: str, gated: bool
) -> None:
    """A block of dz from d, that of the gradient of act(z), gated or not."""
    rows, columns = block
    z = pre[block].to(d.dtype)
    if gated:
        second = _shifted(columns, pre.shape[1] // 2)
        dz[rows, second] = d * ACTIVATIONS[activation](z)
        d = d * pre[rows, second].to(d.dtype)
    dz[block] = _GRADIENTS[activation](d, z)


def _by_blocks(operand: Tensor) -> bool:
    """Whether products are converted to fp32 block by block."""
    return operand.device.type == "cpu" and not multiplies_natively(operand.dtype)


def _wide_product(a: Tensor, b: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """a[I, L]·b[J, L]ᵀ, 16-bit operands in fp32: block by block on a CPU, whole on a GPU."""
    I, J = a.shape[0], b.shape[0]
    if wide_dtype(a.dtype) == a.dtype:
        yield (slice(0, I), slice(0, J)), a @ b.T
    elif a.device.type != "cpu":
        yield (slice(0, I), slice(0, J)), torch.mm(a, b.T, out_dtype=torch.float32)
    else:
        for rows, columns in _blocks(I, J, BLOCK_I, BLOCK_J):
            yield (rows, columns), _block_product(a[rows], b[columns])


def _block_product(a: Tensor, b: Tensor) -> Tensor:
    """a[I, L]·b[J, L]ᵀ of 16-bit operands, in fp32."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], BLOCK_L):
        l = slice(start, start + BLOCK_L)
        total.addmm_(_single(a[:, l]), _single(b[:, l]).T)
    return total


def _single(t: Tensor) -> Tensor:
    """t in fp32, laid out as it is: converting along the rows is several times faster."""
    return t.float() if t.stride(1) == 1 else t.T.float().T


def _column_sums(dz: Tensor) -> Tensor:
    return dz.sum(0, dtype=wide_dtype(dz.dtype))


def _row_blocks(t: Tensor) -> Iterator[Block]:
    """Ranges of rows that fit the cache of a CPU; all of them on a GPU."""
    rows, columns = t.shape
    step = max(1, BLOCK_ELEMENTS // max(1, columns)) if t.device.type == "cpu" else max(1, rows)
    return _blocks(rows, columns, step, max(1, columns))


def _blocks(rows: int, columns: int, step_i: int, step_j: int) -> Iterator[Block]:
    for i in range(0, rows, step_i):
        for j in range(0, columns, step_j):
            yield slice(i, min(i + step_i, rows)), slice(j, min(j + step_j, columns))


def _shifted(columns: slice, by: int) -> slice:
    return slice(columns.start + by, columns.stop + by)
