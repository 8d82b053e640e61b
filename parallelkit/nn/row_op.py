"""The row layer as a function with its derivative: y = Σ_r x_r·W_rᵀ + b, dx_r = dy·W_r."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallelkit.group import Group
from parallelkit.nn import exchange
from parallelkit.nn import product_ops as ops
from parallelkit.nn.kernel_choice import current_kernels
from parallelkit.nn.linear_op import linear_into, parameter_gradients, rows
from parallelkit.nn.term import Term
from parallelkit.ops import wide_dtype

__all__ = ["row_linear"]

Tensor = torch.Tensor


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool
) -> Tensor:
    """Σ_r x_r·W_rᵀ + b.

        x_r [..., K_r]     W_r [N, K_r]     b [N]     y [..., N]

    Args:
        x, weight: this rank's inputs.
        bias: equal on every rank, or None.
        group: the ranks.
        sequence: y is this rank's shard along dimension -2, else whole on every rank.
    """
    return _RowLinear.apply(x, weight, bias, group, sequence)  # type: ignore[no-untyped-call, no-any-return]


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.group, ctx.kernels, ctx.sequence = group, current_kernels(), sequence
        if torch.compiler.is_compiling():
            partial, _ = ops.forward(rows(x), weight, None, None, None, False, False, ctx.kernels)
            partial = partial.view(*x.shape[:-1], weight.shape[0])
            if sequence:
                y = exchange.reduce_scatter(partial, x.ndim - 2, group)
            else:
                y = exchange.all_reduce(partial, group)
            return y if bias is None else y + bias
        moved = x.movedim(-2, 0) if sequence else x
        term = Term(group, (*moved.shape[:-1], weight.shape[0]), wide_dtype(x.dtype))
        linear_into(term.tensor, moved, weight)
        if sequence:
            y = term.scatter().movedim(0, -2)
            y = y if bias is None else y + bias
            return y.to(x.dtype, memory_format=torch.contiguous_format)
        if bias is None:
            return term.finish(x.dtype)
        y = (term.reduce() + bias).to(x.dtype)
        term.release()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.sequence:
            dy = exchange.all_gather(dy, x.ndim - 2, x.shape[-2], ctx.group)
        dz = rows(dy)
        dx = None
        if needs_x:
            dx = ops.input_gradient(dz, weight, None, None, False, ctx.kernels).view(x.shape)
        dweight, dbias = parameter_gradients(
            dz, rows(x), weight, bias, needs_weight, needs_bias, ctx.kernels
        )
        return dx, dweight, dbias, None, None
