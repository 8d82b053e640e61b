"""Linear layers as one operator with one derivative, plain and gated.

    x [..., K]     W [N, K]     b [N]     residual, y [..., N]     M = product of the leading sizes

Column- and row-split layers use the same functions on a rank's shard of W.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from parallelkit.arguments import check_tensor
from parallelkit.errors import InvalidArgumentError, InvalidTypeError
from parallelkit.in_place import gradient_buffer
from parallelkit.nn import product_ops as ops
from parallelkit.nn.kernel_choice import HALVES, current_kernels
from parallelkit.nn.torch_products import ACTIVATIONS
from parallelkit.ops import wide_dtype

__all__ = [
    "cast_for_autocast",
    "check",
    "check_operands",
    "composed",
    "differentiates",
    "gated_linear",
    "is_plain",
    "linear",
    "linear_into",
    "parameter_gradients",
    "rows",
]

Tensor = torch.Tensor
_OPTIONAL = ("bias", "up_bias", "down_bias", "residual")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """act(x·Wᵀ + b) + residual in one pass, and its gradients.

        x [..., K]     W [N, K]     b [N]     residual, y [..., N]

    Args:
        x: float tensor of any strides; M = 0 rows are fine.
        weight: of x's dtype and device.
        bias: likewise, or None.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        residual: added last, or None. y has the wider of its dtype and x's.
        recompute: form x·Wᵀ + b again in the backward pass instead of keeping it: M·N elements less
            memory, one product more. Default: False.
    Returns:
        y. Sums are in fp32 and each result is rounded once; see docs/kernels.md for the exceptions.
        Under autocast the operands are cast as for torch.nn.functional.linear.
    Raises:
        InvalidArgumentError: shapes that do not fit, or an unknown activation.
        InvalidTypeError: operands that are no tensors, of different or of non-float dtypes.
        UsageError: a second derivative was asked for where the operator is fused;
            use_kernels("torch") computes it.
    """
    return _layer("linear", x, weight, bias, activation, residual, False, recompute)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """act(x·W₁ᵀ + b₁) ⊙ (x·W₂ᵀ + b₂) + residual in one pass over x: SwiGLU and its kind.

        x [..., K]     W [2N, K]     b [2N]     residual, y [..., N]

    Args:
        weight: the gate's rows W₁, then W₂'s.
        bias: likewise, or None.
        activation: the gate's; "silu" makes SwiGLU, "gelu" GEGLU. Not None.
        x, residual, recompute: as for `linear`.
    Returns:
        y.
    Raises:
        InvalidArgumentError, InvalidTypeError, UsageError: as `linear`.
    Source: Shazeer 2020, "GLU variants improve transformer".
    """
    return _layer("gated_linear", x, weight, bias, activation, residual, True, recompute)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """out = x·Wᵀ, one rank's share of a row-split layer's sum, before the reduction; no autograd.

        x [..., K/R]     W [N, K/R]     out [..., N]

    Args:
        out: receives the sum rounded to its dtype: float32 loses nothing of it. It may lie in
            memory that peers read (`Group.empty`); its leading sizes must be one in memory.
        x, weight: this rank's columns.
        bias: given by one rank of the group, None by the others, so that it is added once.
    Raises:
        InvalidArgumentError, InvalidTypeError: as `linear`.
    """
    check_operands("linear_into", x=x, weight=weight, bias=bias)
    check_tensor("linear_into", "out", out)
    check("linear_into", x, x.shape, weight, bias, None, out, False)
    try:
        flat = out.view(math.prod(out.shape[:-1]), out.shape[-1])
    except RuntimeError:
        raise InvalidArgumentError(
            "linear_into: out must be [..., N] with leading sizes that are one in memory, got "
            f"{tuple(out.shape)} with strides {out.stride()}"
        ) from None
    ops.partial_sum(rows(x), weight, bias, flat, current_kernels())


def _layer(
    call: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    gated: bool,
    recompute: bool,
) -> Tensor:
    check_operands(call, x=x, weight=weight, bias=bias, residual=residual)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check(call, x, x.shape, weight, bias, activation, residual, gated)
    kernels = current_kernels()
    if is_plain(x, kernels):
        arguments = (x, weight, bias, activation, residual, gated)
        return (
            checkpoint(composed, *arguments, use_reentrant=False)
            if recompute
            else composed(*arguments)
        )
    keep = activation is not None and not recompute and not _relu_alone(activation, residual, gated)
    keep = keep and differentiates(x, weight, bias)
    flat_residual = None if residual is None else rows(residual)
    y, _ = ops.forward(rows(x), weight, bias, flat_residual, activation, gated, keep, kernels)
    return y.view(*x.shape[:-1], y.shape[1])  # type: ignore[no-any-return]


def composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """The same layer out of PyTorch's operators, each rounding and differentiating for itself."""
    z = F.linear(x, weight, bias)
    gate, *up = z.chunk(2, -1) if gated else (z,)
    y = gate if activation is None else ACTIVATIONS[activation](gate)
    if up:
        y = y * up[0]
    return y if residual is None else y + residual


def is_plain(x: Tensor, kernels: str) -> bool:
    """Whether PyTorch's own operators are all that a layer on x needs.

    Not for 16 bits: there even the CPU gains by fp32 between product and activation.
    """
    return kernels == "torch" or (kernels == "auto" and x.dtype not in HALVES)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def rows(t: Tensor) -> Tensor:
    """[..., K] as [M, K]: a view wherever its strides allow one."""
    return t.unsqueeze(0) if t.ndim == 1 else t.flatten(0, -2)


def cast_for_autocast(*tensors: Any) -> Any:
    """The operands as torch.nn.functional.linear would see them under autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    eligible = (torch.float32, *HALVES)
    return tuple(t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors)


def check_operands(call: str, *, x: Tensor, **others: Tensor | None) -> None:
    """InvalidTypeError where one of a layer's operands is no tensor; a bias may be None."""
    check_tensor(call, "x", x)
    for name, operand in others.items():
        if operand is not None or name not in _OPTIONAL:
            check_tensor(call, name, operand)


def check(
    call: str,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    gated: bool,
) -> None:
    """Raise unless the arguments make a layer on a tensor of x's kind and of this shape."""
    known = isinstance(activation, str) and activation in ACTIVATIONS
    if activation is not None and not known or activation is None and gated:
        wanted = ", ".join(ACTIVATIONS) + ("" if gated else " or None")
        raise InvalidArgumentError(f"{call}: activation must be {wanted}, got {activation!r}")
    if len(shape) == 0 or weight.ndim != 2 or shape[-1] != weight.shape[1]:
        raise InvalidArgumentError(
            f"{call}: input must be [..., K] and weight [N, K], got {tuple(shape)} and "
            f"{tuple(weight.shape)}"
        )
    width = weight.shape[0]
    if gated and width % 2:
        raise InvalidArgumentError(f"{call}: weight must have two halves of rows, got {width} rows")
    if bias is not None and bias.shape != (width,):
        raise InvalidArgumentError(f"{call}: bias must be [{width}], got {tuple(bias.shape)}")
    result = (*shape[:-1], width // 2 if gated else width)
    if residual is not None and residual.shape != result:
        raise InvalidArgumentError(
            f"{call}: residual or out must be {result}, got {tuple(residual.shape)}"
        )
    operands = [t for t in (x, weight, bias) if t is not None]
    if not x.is_floating_point() or any(t.dtype != x.dtype for t in operands):
        raise InvalidTypeError(
            f"{call}: x, weight and bias must have one float dtype, got "
            f"{', '.join(str(t.dtype) for t in operands)}; cast them or use autocast"
        )
    for t in (*operands, residual):
        if t is not None and t.device != x.device:
            raise InvalidArgumentError(
                f"{call}: all tensors must be on {x.device} as x is, got one on {t.device}"
            )


def _relu_alone(activation: str | None, residual: Tensor | None, gated: bool) -> bool:
    """Whether y says as much of act' as z would: relu'(relu(z)) = relu'(z). y is kept anyway."""
    return activation == "relu" and residual is None and not gated


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, activation, gated, keep, kernels = inputs
    y, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.set_materialize_grads(False)
    kept = y if _relu_alone(activation, residual, gated) else pre if keep else None
    ctx.save_for_backward(x, weight, bias, kept)
    ctx.activation, ctx.gated, ctx.kernels = activation, gated, kernels


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    x, weight, bias, pre = ctx.saved_tensors
    kernels = ctx.kernels
    dz = dy.to(x.dtype)
    if ctx.activation is not None:
        if pre is None:
            pre, _ = ops.forward(x, weight, bias, None, None, False, False, kernels)
        dz = ops.activation_gradient(dy, pre, ctx.activation, ctx.gated, kernels)
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    dx = ops.input_gradient(dz, weight, None, None, False, kernels) if needs_x else None
    dweight, dbias = parameter_gradients(dz, x, weight, bias, needs_weight, needs_bias, kernels)
    return dx, dweight, dbias, dy if needs_residual else None, None, None, None, None


ops.set_gradient(ops.forward, _save, _backward)


def parameter_gradients(
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
    kernels: str,
) -> tuple[Tensor | None, Tensor | None]:
    """dW and db for autograd to add; None where nobody wants them or they are in place already."""
    if torch.compiler.is_compiling():  # a graph can add to nothing in place
        dweight, dbias = ops.weight_gradient(dz, x, needs_bias, weight.dtype, kernels)
        return dweight if needs_weight else None, dbias if needs_bias else None
    if not needs_weight:
        return None, dz.sum(0, dtype=wide_dtype(dz.dtype)) if needs_bias else None
    targets = (weight, bias) if needs_bias else (weight,)
    buffers = [buffer for t in targets if (buffer := gradient_buffer(t, x.dtype)) is not None]
    if len(buffers) == len(targets):
        ops.add_weight_gradient(dz, x, buffers[0], buffers[1] if needs_bias else None, kernels)
        return None, None
    dtype = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    dweight, dbias = ops.weight_gradient(dz, x, needs_bias, dtype or weight.dtype, kernels)
    return dweight, dbias if needs_bias else None
